"""Saves of a TrainingJob: Checkpoint objects for what its attempts announce, and their retention. Pure.

Called by the other modules of this folder.
"""

from __future__ import annotations

import math

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.domain.labels import EXPIRED, PREFIX
from stoker.operator.domain.plan import Object, Patch, Ref
from stoker.operator.domain.retention import takes_place
from stoker.operator.reconcile.trainingjob.announced_saves import Save, announced, last_listed_step, omits_saves
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.storage import settled
from stoker.operator.render.trainer import job_labels
from stoker.pod.writer import writer_of


def new_checkpoints(view: TrainingView) -> tuple[Object, ...]:
    """Checkpoint objects that are still missing. A save that a Checkpoint requested belongs to that one.

    While the leader's word omits older saves, none is made for a save that is newer than those of the list.
    """
    known = {found.status.folder for found in view.checkpoints}
    known |= {found.spec.source.save.folder for found in view.checkpoints if found.spec.source.save}
    asked = {found.metadata.uid for found in view.checkpoints if found.spec.source.job_ref}
    first = -1 if view.attempt is None or view.attempt.announced_step is None else view.attempt.announced_step
    last = last_listed_step(view) if omits_saves(view) else math.inf
    fresh = (save for save in announced(view) if save.folder not in known and save.id not in asked)
    return tuple(_checkpoint(view, save) for save in fresh if first < save.step <= last)


def checkpoint_name(job_name: str, folder: str) -> str:
    """`<job>-step-00001200-<writer>`: deterministic, so that a repeated create finds its own object."""
    return f"{job_name[:63]}-{folder.replace('.', '-')}"


def expired(view: TrainingView) -> tuple[Patch, ...]:
    """Patches that mark the Checkpoints of the saves beyond `maxToKeep`, of those that take one of its places.

    A save is beyond where that many newer ones are verified, whether it is verified itself or not. Several Checkpoints
    may have one save. Never marked are the newest verified one, and the one that the job resumes.
    """
    keep = view.job.spec.checkpoint.max_to_keep
    if keep is None:
        return ()
    places = {found["metadata"]["uid"] for found in view.seen.of_kind("Checkpoint") if takes_place(found)}
    counted = [found for found in view.checkpoints if found.metadata.uid in places]
    verified = [found for found in counted if found.status.verified]
    saves = {found.status.folder: found.status.step or 0 for found in verified}
    kept = [*saves][: max(keep, 1)]
    last_step = saves[kept[-1]] if len(kept) == max(keep, 1) else -1
    beyond = [found for found in verified if found.status.folder not in kept and found is not view.newest_verified]
    beyond += [found for found in counted if _is_unverified(view, found) and (found.status.step or 0) < last_step]
    surplus = [found for found in beyond if _may_expire(view, found)]
    return tuple(Patch(_ref(found), {"metadata": {"labels": {EXPIRED: "true"}}}) for found in surplus)


def _is_unverified(view: TrainingView, found: Checkpoint) -> bool:
    """Whether a save waits for a task to verify it. One that the running agent still reads back is left to it."""
    status, report = found.status, (view.report or {}) if view.leader_running else {}
    read_back = {raw.get("folder") for raw in report.get("saves", ()) if raw.get("verified") is None}
    return status.phase == "Complete" and not status.verified and status.folder not in read_back


def _may_expire(view: TrainingView, found: Checkpoint) -> bool:
    resumed = view.attempt.resumed_from if view.attempt else None
    loading = resumed is not None and resumed.folder == found.status.folder and not view.job.status.terminal
    return not loading


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


def _ref(found: Checkpoint) -> Ref:
    return Ref("Checkpoint", found.metadata.namespace, found.metadata.name, found.metadata.uid)
