"""Figures of a TrainingJob's status, and small facts about its attempt. Pure functions of the view."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from stoker.operator.api.trainingjob_status import Attempt, Progress
from stoker.operator.api.value import measured
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.pods import PodState, pod_state, ref_of
from stoker.operator.reconcile.trainingjob.saves import announced
from stoker.operator.reconcile.trainingjob.view import TrainingView, saved_step


def progress_figures(view: TrainingView) -> dict[str, Any]:
    """The agent's figures, as they are known; none leaves the last ones."""
    report = view.report
    if report is None or report.get("step") is None:
        return {}
    at = report.get("progressed_at")
    eta = report.get("eta_s")
    figures = Progress(
        step=report["step"],
        total_steps=report.get("total_steps"),
        tokens=report.get("tokens"),
        loss=measured(report.get("loss")),
        validation_loss=measured(report.get("validation_loss")),
        learning_rate=measured(report.get("learning_rate")),
        gradient_norm=measured(report.get("grad_norm")),
        tokens_per_second=measured(report.get("tokens_per_s")),
        eta_seconds=None if eta is None else max(0, round(eta)),
        progressed_at=timestamp(datetime.fromtimestamp(at, view.now.tzinfo)) if at else None,
    )
    return {"progress": figures}


def checkpoint_figures(view: TrainingView) -> dict[str, Any]:
    """What the job's Checkpoint objects say; progress in verified steps refills the restart budget."""
    saved = [found for found in view.checkpoints if found.status.step is not None and found.status.folder]
    verified = view.newest_verified
    scored = [found for found in view.checkpoints if found.status.verified and found.status.validation_loss]
    best = min(scored, key=lambda found: float(found.status.validation_loss or "inf"), default=None)
    figures: dict[str, Any] = {
        "checkpoints": len(view.checkpoints),
        "latest_checkpoint": saved_step(saved[0]) if saved else None,
        "newest_verified_checkpoint": saved_step(verified) if verified else None,
        "best_verified_checkpoint": saved_step(best) if best else None,
    }
    step = verified.status.step or 0 if verified else 0
    if step > view.job.status.best_step:
        figures |= {"best_step": step, "failures_without_progress": 0}
    return figures


def completed(view: TrainingView) -> bool:
    """Every pod of the running attempt has done its part. A leader that ended well speaks for one that was removed since."""
    attempt, gang = view.attempt, view.gang
    if attempt is None or attempt.ended_at is not None or not gang:
        return False
    whole = len(gang) == gang_size(view) or view.leader is not None
    return whole and all(pod_state(pod) is PodState.SUCCEEDED for pod in gang)


def gang_size(view: TrainingView) -> int:
    pinned = view.job.status.pinned
    if pinned is not None and pinned.rendered is not None:
        return int(pinned.rendered["config"]["gang"]["nodes"])
    return view.job.spec.workers.replicas


def closed(view: TrainingView, attempt: Attempt) -> Attempt:
    if attempt.ended_at is not None:
        return attempt
    return attempt.model_copy(update={"ended_at": view.time, "last_step": reported_step(view, attempt)})


def reported_step(view: TrainingView, attempt: Attempt) -> int | None:
    """The last step that is known to be done: a last word may tell of a save that is newer than the last report."""
    saved = max((save.step for save in announced(view)), default=None)
    done = max((step for step in (_polled_step(view), saved) if step is not None), default=None)
    return attempt.first_step if done is None else done


def _polled_step(view: TrainingView) -> int | None:
    if view.report is not None and view.report.get("step") is not None:
        return int(view.report["step"])
    progress = view.job.status.progress
    return progress.step if progress else None


def undeleted(pods: Iterable[Object]) -> tuple[Ref, ...]:
    return tuple(ref_of(pod) for pod in pods if not pod["metadata"].get("deletionTimestamp"))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
