"""An edit of a running job that is applied at once: save, end the attempt, start the next one in the new form.

With `run.applyChanges: NextAttempt` the edit waits for an end that comes by itself, unless no pod of the attempt has
run yet: such a gang may wait for what the edit repairs, and nothing is lost with it. The attempt that ends for an edit
has no failure, so it counts against no budget; its saves are looked up as after any other attempt.

Pure. Called by `reconcile`.
"""

from __future__ import annotations

from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import PodState, pod_state
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.trainingjob.attempt import closed, completed, gang_size
from stoker.operator.reconcile.trainingjob.drain import asked_to, drain
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.pending_edit import pending_edit
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView

RESTART_FOR_EDIT = "RestartForEdit"
"""Reason of the event."""


def apply_edit(view: TrainingView) -> JobOutcome | None:
    """Restart the gang where its rendering lacks an edit that is to act at once.

    A restart that was asked for goes on, also when the edit is taken back meanwhile. Where a pod has
    ended before, the attempt ends anyway, and that is `recover`'s.
    """
    attempt = view.attempt
    if attempt is None or attempt.ended_at is not None or completed(view):
        return None
    asked = asked_to(view, "restart") is not None
    if not asked and not _wanted(view):
        return None
    if not view.live:
        return _over(view)
    how = "never ran and starts anew" if never_ran(view) else "saves and restarts"
    text = f"attempt {attempt.number} {how} with {', '.join(_changes(view))}"
    return drain(view, "restart", text, (Event("Normal", RESTART_FOR_EDIT, shortened(text)),))


def applies_at_once(view: TrainingView) -> bool:
    """Whether what the rendering lacks is not left to the next attempt.

    By the user's wish, for another size, or because nothing has run that would have to end.
    """
    other_size = view.size is not None and view.size.workers != gang_size(view)
    return other_size or view.job.spec.run.apply_changes == "Restart" or never_ran(view)


def never_ran(view: TrainingView) -> bool:
    """Whether no pod of the attempt has started: all wait for nodes, images or volumes."""
    waiting = {PodState.GATED, PodState.PENDING}
    return bool(view.gang) and all(pod_state(pod) in waiting for pod in view.gang)


def _wanted(view: TrainingView) -> bool:
    ended = any(pod_state(pod) in {PodState.FAILED, PodState.SUCCEEDED} for pod in view.gang)
    return applies_at_once(view) and not ended and bool(pending_edit(view, view.job.status.pinned))


def _changes(view: TrainingView) -> tuple[str, ...]:
    return pending_edit(view, view.job.status.pinned) or ("the spec as it was",)


def _over(view: TrainingView) -> JobOutcome:
    """The end of the attempt: no failure, and its last step as its pods reported it."""
    assert view.attempt is not None
    message = f"restarts with {', '.join(_changes(view))}"
    return JobOutcome(
        phase="Restarting",
        health=Health.PROGRESSING,
        reason="Restarting",
        message=message,
        changes=JobChanges(attempt=closed(view, view.attempt, message), requests=()),
        plan=Plan(create=new_checkpoints(view), patch=expired(view)),
    )
