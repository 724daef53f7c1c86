"""Saves of a TrainingJob: Checkpoint objects for what its attempts announce, and their retention. Pure.

Called by the other modules of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.domain.labels import EXPIRED, PREFIX, TASK, WRITER
from stoker.operator.domain.plan import Object, Patch, Ref
from stoker.operator.domain.pods import ended, exit_of, label
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.storage import settled
from stoker.operator.render.trainer import job_labels
from stoker.pod.writer import writer_of


@dataclass(frozen=True)
class Save:
    """One durable save, as an attempt announced it."""

    id: str
    folder: str
    step: int
    digest: str
    attempt: int
    verified: bool | None
    reason: str


def announced(view: TrainingView) -> tuple[Save, ...]:
    """Saves of the current attempt, by report, termination messages and the list of a task pod.

    Each folder once; folders of other writers are ignored.
    """
    attempt = view.attempt
    if attempt is None:
        return ()
    writer = writer_of(view.job.metadata.uid, attempt.number)
    by_folder: dict[str, Save] = {}
    for save in (
        *_reported(view, attempt.number),
        *_messages(view, attempt.number),
        *_listed(view, attempt.number, writer),
    ):
        if not save.folder.endswith(f".{writer}"):
            continue
        known = by_folder.setdefault(save.folder, save)
        if known.verified is None:
            by_folder[save.folder] = replace(known, verified=save.verified)
    return tuple(sorted(by_folder.values(), key=lambda save: save.step))


def new_checkpoints(view: TrainingView) -> tuple[Object, ...]:
    """Checkpoint objects that are still missing. A save that a Checkpoint requested belongs to that one."""
    known = {found.status.folder for found in view.checkpoints}
    known |= {found.spec.source.save.folder for found in view.checkpoints if found.spec.source.save}
    asked = {found.metadata.uid for found in view.checkpoints if found.spec.source.job_ref}
    done = view.attempt.announced_step if view.attempt else None
    fresh = (save for save in announced(view) if save.folder not in known and save.id not in asked)
    return tuple(_checkpoint(view, save) for save in fresh if done is None or save.step > done)


def checkpoint_name(job_name: str, folder: str) -> str:
    """`<job>-step-00001200-<writer>`: deterministic, so that a repeated create finds its own object."""
    return f"{job_name[:63]}-{folder.replace('.', '-')}"


def expired(view: TrainingView) -> tuple[Patch, ...]:
    """Patches that mark the verified Checkpoints of the saves beyond `maxToKeep`, oldest first.

    Several Checkpoints may have one save. Never marked are pinned, used and imported ones, and the newest verified one.
    """
    keep = view.job.spec.checkpoint.max_to_keep
    if keep is None:
        return ()
    newest = view.newest_verified
    counted = [found for found in view.checkpoints if found.status.verified and _counts(found)]
    saves = [*dict.fromkeys(found.status.folder for found in counted)]
    given_up = {*saves[max(keep, 1) :]}
    beyond = [found for found in counted if found.status.folder in given_up and found is not newest]
    surplus = [found for found in beyond if _may_expire(view, found)]
    return tuple(Patch(_ref(found), {"metadata": {"labels": {EXPIRED: "true"}}}) for found in surplus)


def _counts(found: Checkpoint) -> bool:
    """Whether a Checkpoint counts for `maxToKeep`; pinned, imported and used ones do not."""
    return not (found.spec.pinned or found.status.in_use_by or found.spec.source.import_)


def _may_expire(view: TrainingView, found: Checkpoint) -> bool:
    resumed = view.attempt.resumed_from if view.attempt else None
    loading = resumed is not None and resumed.folder == found.status.folder and not view.job.status.terminal
    return not (loading or EXPIRED in found.metadata.labels or found.deleting)


def _checkpoint(view: TrainingView, save: Save) -> Object:
    job = view.job
    workers = job.spec.workers
    task = SmallPod(
        service_account_name=workers.service_account_name,
        image_pull_secrets=workers.image_pull_secrets,
        node_selector=workers.node_selector,
        tolerations=workers.tolerations,
    )
    labels = {f"{PREFIX}/{name}": value for name, value in job_labels(job).items()}
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {
            "name": checkpoint_name(job.metadata.name, save.folder),
            "namespace": job.metadata.namespace,
            "labels": {
                "app.kubernetes.io/part-of": "stoker",
                "app.kubernetes.io/managed-by": "stoker-operator",
                **labels,
                f"{PREFIX}/attempt": str(save.attempt),
            },
        },
        "spec": {
            "source": {
                "save": {
                    "jobRef": {"name": job.metadata.name, "uid": job.metadata.uid},
                    "attempt": save.attempt,
                    "writer": writer_of(job.metadata.uid, save.attempt),
                    "storage": settled(view.storage, job.metadata.name).to_wire(),
                    "folder": save.folder,
                    "step": save.step,
                    "digest": save.digest,
                    "reason": save.reason,
                }
            },
            "deletionPolicy": job.spec.checkpoint.deletion_policy,
            "task": task.to_wire(),
        },
    }


def _reported(view: TrainingView, attempt: int) -> Iterator[Save]:
    for raw in (view.report or {}).get("saves", ()):
        if raw.get("state") == "Committed" and raw.get("digest"):
            yield _save(raw, attempt, str(raw.get("reason") or "interval"))


def _messages(view: TrainingView, attempt: int) -> Iterator[Save]:
    for pod in view.gang:
        message = exit_of(pod).message if ended(pod) else None
        reasons = message.result.get("save_reasons", {}) if message else {}
        for save in message.saves if message else ():
            if save.digest:
                reason = str(reasons.get(save.folder) or "interval")
                yield Save(save.id, save.folder, save.step, save.digest, attempt, save.verified, reason)


def _listed(view: TrainingView, attempt: int, writer: str) -> Iterator[Save]:
    for pod in view.tasks:
        if label(pod, TASK) != "list" or label(pod, WRITER) != writer or not ended(pod):
            continue
        message = exit_of(pod).message
        for raw in message.result.get("saves", ()) if message else ():
            yield _save(raw, attempt, "found")


def _save(raw: Mapping[str, Any], attempt: int, reason: str) -> Save:
    verified = raw.get("verified")
    return Save(
        id=str(raw.get("id") or raw["folder"]),
        folder=str(raw["folder"]),
        step=int(raw["step"]),
        digest=str(raw["digest"]),
        attempt=attempt,
        verified=verified if isinstance(verified, bool) else None,
        reason=reason,
    )


def _ref(found: Checkpoint) -> Ref:
    return Ref("Checkpoint", found.metadata.namespace, found.metadata.name, found.metadata.uid)
