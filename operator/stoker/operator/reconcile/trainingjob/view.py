"""The observation of a TrainingJob, sorted once.

The gang of the current attempt, older pods, tasks, Checkpoints, the agent's report, the spec in force.

Read-only; made once per pass by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.storage import StorageSpec
from stoker.operator.api.trainingjob import TrainingJob, TrainingJobSpec
from stoker.operator.api.trainingjob_status import Attempt, ElasticSize, SavedStep
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.elastic import with_form
from stoker.operator.domain.labels import ATTEMPT, CHECKPOINT_UID, JOB_UID, NODE_RANK, ROLE, PodRole
from stoker.operator.domain.plan import Object, Observed
from stoker.operator.domain.pods import PodState, ended, is_owned, label, label_number, pod_state
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.intent import Intent, read_in_force
from stoker.operator.render.trainer import intent_of

CONTROLS = ("run.cancel", "run.suspend", "run.activeDeadlineSeconds", "run.ttlSecondsAfterFinished")
"""Fields that always come from the present spec, also while the rest of an edit is refused."""


@dataclass(frozen=True)
class TrainingView:
    """Read-only; every decision of the reconcile is a function of it."""

    job: TrainingJob
    """With the spec in force, which is not the present one while an edit is refused."""
    intent: Intent
    """Its spec has the size of an elastic run too."""
    written: Mapping[str, Any]
    """The spec in force as it was written, without that size."""
    base: str
    """Hash of the parts of `written` that shape pods."""
    size: ElasticSize | None
    """The size of an elastic run, as long as spec and limits are those that it was chosen for."""
    seen: Observed
    settings: Settings
    now: datetime
    gang: tuple[Object, ...]
    """Pods of the current attempt that exist, by node rank."""
    older: tuple[Object, ...]
    """Trainer pods of earlier attempts."""
    tasks: tuple[Object, ...]
    checkpoints: tuple[Checkpoint, ...]
    """Checkpoints of this job, newest step first."""
    report: Mapping[str, Any] | None
    """The newest answer of pod 0's agent in this attempt, however old."""

    @property
    def attempt(self) -> Attempt | None:
        return self.job.status.attempt

    @property
    def live(self) -> tuple[Object, ...]:
        """Trainer pods of any attempt in which a process may still run."""
        return tuple(pod for pod in (*self.gang, *self.older) if not ended(pod))

    @property
    def leader(self) -> Object | None:
        """Pod 0 of the gang, whose agent answers for all."""
        return next((pod for pod in self.gang if label(pod, NODE_RANK) == "0"), None)

    @property
    def leader_running(self) -> bool:
        return self.leader is not None and pod_state(self.leader) is PodState.RUNNING

    @property
    def storage(self) -> StorageSpec:
        return self.job.spec.checkpoint.storage

    @property
    def newest_verified(self) -> Checkpoint | None:
        """The verified Checkpoint with the highest step that no attempt found corrupt.

        The data of one that is being deleted may go at any moment.
        """
        rejected = self.job.status.resumption.rejected if self.job.status.resumption else ()
        sound = (found for found in self.checkpoints if found.status.verified and not found.deleting)
        return next((found for found in sound if found.status.folder not in rejected), None)

    @property
    def verified_step(self) -> int:
        """Furthest step that a verified save holds; 0 without one."""
        newest = self.newest_verified
        return newest.status.step or 0 if newest else 0

    @property
    def time(self) -> str:
        return timestamp(self.now)


def training_view(seen: Observed, settings: Settings, now: datetime) -> TrainingView:
    """The observation, sorted."""
    job, intent = read_in_force(TrainingJob, seen.resource, controls=CONTROLS)
    written, base = intent.spec, intent_of(job.spec)
    size = _size_in_force(job, base)
    job, intent = _in_size(job, intent, size) if size is not None else (job, intent)
    mine = [pod for pod in seen.of_kind("Pod") if is_owned(pod, job.metadata.uid)]
    trainers = [pod for pod in mine if label(pod, ROLE) == PodRole.TRAINER]
    number = str(job.status.attempt.number) if job.status.attempt else ""
    gang = sorted((pod for pod in trainers if label(pod, ATTEMPT) == number), key=_node_rank)
    return TrainingView(
        job=job,
        intent=intent,
        written=written,
        base=base,
        size=size,
        seen=seen,
        settings=settings,
        now=now,
        gang=tuple(gang),
        older=tuple(pod for pod in trainers if label(pod, ATTEMPT) != number),
        tasks=tuple(pod for pod in mine if label(pod, ROLE) == PodRole.TASK and not label(pod, CHECKPOINT_UID)),
        checkpoints=_checkpoints(seen, job),
        report=_leader_report(seen, gang, number),
    )


def _size_in_force(job: TrainingJob, base: str) -> ElasticSize | None:
    size, limits = job.status.elastic, job.spec.run.elastic
    if size is None or limits is None or size.base != base:
        return None
    return size if limits.min_workers <= size.workers <= limits.max_workers else None


def _in_size(job: TrainingJob, intent: Intent, size: ElasticSize) -> tuple[TrainingJob, Intent]:
    """Job and spec in force in the size of an elastic run."""
    spec = with_form(intent.spec, size.form)
    return job.model_copy(update={"spec": TrainingJobSpec.model_validate(spec)}), replace(intent, spec=spec)


def saved_step(found: Checkpoint) -> SavedStep:
    """A Checkpoint object as the job's status names it."""
    return SavedStep(
        name=found.metadata.name,
        folder=found.status.folder or "",
        step=found.status.step or 0,
        digest=found.status.digest or "",
        verified=found.status.verified,
    )


def _checkpoints(seen: Observed, job: TrainingJob) -> tuple[Checkpoint, ...]:
    mine = [
        read_in_force(Checkpoint, found)[0]
        for found in seen.of_kind("Checkpoint")
        if found["metadata"].get("labels", {}).get(JOB_UID) == job.metadata.uid
    ]
    mine = [found for found in mine if _is_of(found, job)]
    return tuple(sorted(mine, key=lambda found: (-(found.status.step or 0), found.metadata.name)))


def _is_of(found: Checkpoint, job: TrainingJob) -> bool:
    """Whether the job wrote it or was asked for it. An imported folder is of no job, whatever its labels say."""
    source = found.spec.source
    named = source.save.job_ref if source.save else source.job_ref
    return named is not None and named.name == job.metadata.name and named.uid in (None, job.metadata.uid)


def _leader_report(seen: Observed, gang: list[Object], number: str) -> Mapping[str, Any] | None:
    for pod in gang:
        found = seen.reports.get(pod["metadata"]["uid"])
        if label(pod, NODE_RANK) == "0" and found is not None and str(found.get("attempt")) == number:
            return found
    return None


def _node_rank(pod: Object) -> int:
    return label_number(pod, NODE_RANK)
