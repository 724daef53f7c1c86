"""What a TrainingJob's reconcile sees, sorted once: the gang of the current attempt, older pods, tasks, Checkpoints, the agent's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.metadata import read
from stoker.operator.api.storage import Storage
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.api.trainingjob_status import Attempt, SavedStep
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.labels import JOB_UID
from stoker.operator.domain.plan import Object, Observed, Plan
from stoker.operator.domain.pods import PodState, ended, label, pod_state
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.status_patch import settled


@dataclass(frozen=True)
class TrainingView:
    """Read-only; every decision of the reconcile is a function of it."""

    job: TrainingJob
    seen: Observed
    settings: Settings
    now: datetime
    gang: tuple[Object, ...]
    """Pods of the current attempt that exist, by node rank."""
    older: tuple[Object, ...]
    """Trainer pods of attempts before it."""
    tasks: tuple[Object, ...]
    checkpoints: tuple[Checkpoint, ...]
    """This job's, newest step first."""
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
        return next((pod for pod in self.gang if label(pod, "node-rank") == "0"), None)

    @property
    def leader_running(self) -> bool:
        return self.leader is not None and pod_state(self.leader) is PodState.RUNNING

    @property
    def storage(self) -> Storage:
        return self.job.spec.checkpoint.storage

    @property
    def newest_verified(self) -> Checkpoint | None:
        """The verified Checkpoint with the highest step that no attempt found corrupt."""
        rejected = self.job.status.resumption.rejected if self.job.status.resumption else ()
        return next(
            (found for found in self.checkpoints if found.status.verified and found.status.folder not in rejected), None
        )

    @property
    def time(self) -> str:
        return timestamp(self.now)


def look(seen: Observed, settings: Settings, now: datetime) -> TrainingView:
    """Sort what is observed."""
    job = read(TrainingJob, seen.resource)
    mine = [pod for pod in seen.of_kind("Pod") if pod["metadata"].get("labels", {}).get(JOB_UID) == job.metadata.uid]
    trainers = [pod for pod in mine if label(pod, "role") == "trainer"]
    number = str(job.status.attempt.number) if job.status.attempt else ""
    gang = sorted((pod for pod in trainers if label(pod, "attempt") == number), key=_node_rank)
    return TrainingView(
        job=job,
        seen=seen,
        settings=settings,
        now=now,
        gang=tuple(gang),
        older=tuple(pod for pod in trainers if label(pod, "attempt") != number),
        tasks=tuple(pod for pod in mine if label(pod, "role") == "task" and not label(pod, "checkpoint-uid")),
        checkpoints=_checkpoints(seen, job),
        report=_leader_report(seen, gang, number),
    )


def saved_step(found: Checkpoint) -> SavedStep:
    """A Checkpoint object as the job's status names it."""
    return SavedStep(
        name=found.metadata.name,
        folder=found.status.folder or "",
        step=found.status.step or 0,
        digest=found.status.digest or "",
        verified=found.status.verified,
    )


def settle(
    view: TrainingView, changes: Mapping[str, Any], conditions: tuple[Condition, ...], plan: Plan | None = None
) -> Plan:
    """`plan` with the status that results from `changes`; the status is left out where nothing changes."""
    job = view.job
    attempt = changes.get("attempt", job.status.attempt)
    known = _with_announced_step(view, attempt) if attempt else None
    changed = {**changes, "attempt": known}
    return settled(plan, job.status, changed, conditions, now=view.now, generation=job.metadata.generation)


def _checkpoints(seen: Observed, job: TrainingJob) -> tuple[Checkpoint, ...]:
    mine = [
        read(Checkpoint, found)
        for found in seen.of_kind("Checkpoint")
        if found["metadata"].get("labels", {}).get(JOB_UID) == job.metadata.uid
    ]
    return tuple(sorted(mine, key=lambda found: (-(found.status.step or 0), found.metadata.name)))


def _leader_report(seen: Observed, gang: list[Object], number: str) -> Mapping[str, Any] | None:
    for pod in gang:
        found = seen.reports.get(pod["metadata"]["uid"])
        if label(pod, "node-rank") == "0" and found is not None and str(found.get("attempt")) == number:
            return found
    return None


def _node_rank(pod: Object) -> int:
    return int(label(pod, "node-rank") or 0)


def _with_announced_step(view: TrainingView, attempt: Attempt) -> Attempt:
    """The attempt, remembering the highest of its saves that was seen as an object."""
    mine = [found for found in view.checkpoints if _writer(found) == attempt.writer]
    steps = [found.spec.source.save.step if found.spec.source.save else found.status.step for found in mine]
    highest = max((step for step in (*steps, attempt.announced_step) if step is not None), default=None)
    return attempt if highest == attempt.announced_step else attempt.model_copy(update={"announced_step": highest})


def _writer(found: Checkpoint) -> str | None:
    return found.spec.source.save.writer if found.spec.source.save else found.status.writer
