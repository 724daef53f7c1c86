"""A gang gives its room back: its attempt ends without counting, and the next one waits with gates. Pure."""

from __future__ import annotations

from stoker.operator.api.trainingjob_status import Attempt, Failure
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.trainingjob.attempt import undeleted
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.pod.causes import Action

GANG_TIMEOUT = "GangTimeout"
"""Cause of an attempt whose pods got nodes, and not all of them could be made or scheduled there."""
ROOM_TAKEN = "the room of pods that already have their nodes was taken"


def give_back(view: TrainingView, attempt: Attempt, detail: str) -> JobOutcome:
    """End the attempt without counting it: its pods go, and the next one is placed anew."""
    text = shortened(detail)
    failure = Failure(cause=GANG_TIMEOUT, detail=text, at=view.time, action=Action.RETRY_FREE.value)
    over = changed_attempt(attempt, ended_at=view.time, failure=failure, last_step=attempt.first_step)
    return JobOutcome(
        phase="Restarting",
        health=Health.PROGRESSING,
        reason="Restarting",
        message=f"{GANG_TIMEOUT}: {text}",
        changes=JobChanges(attempt=over, last_failure=failure, requests=()),
        plan=Plan(
            delete=undeleted(view.live),
            events=(Event("Warning", GANG_TIMEOUT, f"attempt {attempt.number} ended: {text}; placed anew"),),
        ),
    )


def gave_back(view: TrainingView) -> bool:
    """Whether the attempt before this one gave its room back."""
    last = next(iter(view.job.status.attempts), None)
    return last is not None and last.failure is not None and last.failure.cause == GANG_TIMEOUT
