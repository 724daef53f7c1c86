"""Facts about the attempt of a TrainingJob: the size of its gang, whether it is complete, how far it got.

Pure. Called by the other modules of this folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import cast

from stoker.operator.api.trainingjob_status import Attempt
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.pods import PodState, pod_state, ref_of
from stoker.operator.domain.schedulers import Scheduler
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.trainingjob.announced_saves import announced
from stoker.operator.reconcile.trainingjob.outcome import changed_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView


def completed(view: TrainingView) -> bool:
    """Whether every pod of the running attempt has done its part.

    A leader that ended well stands for pods that were removed since.
    """
    attempt, gang = view.attempt, view.gang
    if attempt is None or attempt.ended_at is not None or not gang:
        return False
    whole = len(gang) == gang_size(view) or view.leader is not None
    return whole and all(pod_state(pod) is PodState.SUCCEEDED for pod in gang)


def gang_size(view: TrainingView) -> int:
    """Number of pods in the pinned rendering; an edit of `workers.replicas` waits for the next attempt."""
    pinned = view.job.status.pinned
    if pinned is not None and pinned.rendered is not None:
        return int(pinned.rendered["config"]["gang"]["nodes"])
    return view.job.spec.workers.replicas


def scheduler_of(attempt: Attempt) -> Scheduler:
    """The scheduler that the attempt was opened with."""
    return cast("Scheduler", attempt.scheduler or "stoker")


def closed(view: TrainingView, attempt: Attempt, why: str) -> Attempt:
    """The attempt with its end, now and for this reason, unless it has ended already."""
    if attempt.ended_at is not None:
        return attempt
    return changed_attempt(attempt, ended_at=view.time, end=shortened(why), last_step=reported_step(view, attempt))


def reported_step(view: TrainingView, attempt: Attempt) -> int | None:
    """Last step that is known to be done, by the newest report or a newer save in a termination message."""
    saved = max((save.step for save in announced(view)), default=None)
    done = max((step for step in (_polled_step(view), saved) if step is not None), default=None)
    return attempt.first_step if done is None else done


def failures_without_progress(view: TrainingView) -> int:
    """Failures that count against the budget: zero again once a save past the best step is verified."""
    status = view.job.status
    return 0 if view.verified_step > status.best_step else status.failures_without_progress


def undeleted(pods: Iterable[Object]) -> tuple[Ref, ...]:
    """References to the pods that are not being deleted yet."""
    return tuple(ref_of(pod) for pod in pods if not pod["metadata"].get("deletionTimestamp"))


def moment(text: str) -> datetime:
    """Parse a time of the status."""
    return datetime.fromisoformat(text)


def _polled_step(view: TrainingView) -> int | None:
    if view.report is not None and view.report.get("step") is not None:
        return int(view.report["step"])
    progress = view.job.status.progress
    return progress.step if progress else None
