"""The goodput ledger in the status of a TrainingJob. Pure; called by `status`, the rules are `domain/goodput`."""

from __future__ import annotations

from stoker.operator.api.trainingjob_status import Attempt, Goodput
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.goodput import Ledger, booked, opened, read_ledger
from stoker.operator.reconcile.trainingjob.view import TrainingView


def goodput(view: TrainingView, phase: str, attempt: Attempt | None) -> Goodput:
    """Return the ledger after this pass; the same one while state and attempt stay."""
    before = view.job.status.goodput
    number = attempt.number if attempt else None
    if before is None:
        return to_status(opened(view.now, phase, number))
    ledger = read_ledger(before.to_wire())
    after = booked(ledger, view.now, phase, number, _lost_share(view.job.status.attempt, attempt))
    return before if after is ledger else to_status(after)


def to_status(ledger: Ledger) -> Goodput:
    """Return the ledger as a status holds it."""
    return Goodput(
        since=timestamp(ledger.since),
        state=ledger.state,
        attempt=ledger.attempt,
        attempt_productive=ledger.attempt_productive,
        **ledger.seconds,
    )


def _lost_share(last: Attempt | None, new: Attempt | None) -> float:
    """The part of the steps of the last attempt that the new one repeats."""
    if last is None or new is None or new.number == last.number:
        return 0.0
    first, reached, resumed = last.first_step or 0, last.last_step or 0, new.first_step or 0
    return (reached - max(resumed, first)) / (reached - first) if reached > first else 0.0
