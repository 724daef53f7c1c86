"""The goodput ledger of a run: where its time went, in whole seconds that add up to its age. Pure.

Time is booked when the state of a run changes, so a run that only makes progress writes nothing. Seconds that were
productive and whose steps a restart repeats move to `lost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

STATES = ("queued", "starting", "productive", "checkpointing", "restarting", "suspended", "lost")
"""States of a run, in the order of a first life; `lost` is never entered, only booked."""
_BY_PHASE: Mapping[str, str] = {
    "Pending": "queued",
    "Starting": "starting",
    "Running": "productive",
    "Checkpointing": "checkpointing",
    "Restarting": "restarting",
    "Suspending": "checkpointing",
    "Cancelling": "checkpointing",
    "Suspended": "suspended",
}


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Seconds by state up to `since`; from then on the run is in `state`."""

    since: datetime
    state: str | None
    """None: the run is over, and no time passes any more."""
    seconds: Mapping[str, int] = field(default_factory=dict)
    attempt: int = 0
    attempt_productive: int = 0
    """Productive seconds of the running attempt, which a restart may lose."""


def state_of(phase: str, attempt: int | None) -> str | None:
    """Return the state of a run in a phase; None for phases after its end. Later starts are restarts."""
    state = _BY_PHASE.get(phase)
    return "restarting" if state == "starting" and attempt else state


def opened(now: datetime, phase: str, attempt: int | None) -> Ledger:
    """Return the ledger of a run that begins now."""
    return Ledger(since=_whole(now), state=state_of(phase, attempt), attempt=attempt or 0)


def read_ledger(status: Mapping[str, Any]) -> Ledger:
    """Return the ledger of `status.goodput`, as the cluster stores it."""
    return Ledger(
        since=datetime.fromisoformat(status["since"]),
        state=status.get("state"),
        seconds={state: int(status.get(state, 0)) for state in STATES},
        attempt=int(status.get("attempt", 0)),
        attempt_productive=int(status.get("attemptProductive", 0)),
    )


def booked(ledger: Ledger, now: datetime, phase: str, attempt: int | None, lost_share: float = 0.0) -> Ledger:
    """Return the ledger with the time in the last state booked, if the state or the attempt is another one now.

    Args:
        lost_share: the part of the last attempt's steps that the new attempt repeats, 0 to 1.
    """
    state = state_of(phase, attempt)
    if state == ledger.state and (attempt or 0) == ledger.attempt:
        return ledger
    after = _with_time(ledger, _whole(now))
    if (attempt or 0) != ledger.attempt:
        after = _with_loss(after, lost_share, attempt or 0)
    return replace(after, state=state)


def totals(ledger: Ledger, now: datetime) -> dict[str, int]:
    """Return the seconds of every state until now. They add up to the age of the run."""
    seconds = _with_time(ledger, _whole(now)).seconds
    return {state: seconds.get(state, 0) for state in STATES}


def _with_time(ledger: Ledger, now: datetime) -> Ledger:
    if ledger.state is None:
        return ledger
    now = max(now, ledger.since)
    passed = int((now - ledger.since).total_seconds())
    productive = ledger.attempt_productive + (passed if ledger.state == "productive" else 0)
    seconds = {**ledger.seconds, ledger.state: ledger.seconds.get(ledger.state, 0) + passed}
    return replace(ledger, since=now, seconds=seconds, attempt_productive=productive)


def _with_loss(ledger: Ledger, share: float, attempt: int) -> Ledger:
    lost = round(ledger.attempt_productive * min(max(share, 0.0), 1.0))
    moved = {
        "productive": ledger.seconds.get("productive", 0) - lost,
        "lost": ledger.seconds.get("lost", 0) + lost,
    }
    return replace(ledger, seconds={**ledger.seconds, **moved}, attempt=attempt, attempt_productive=0)


def _whole(now: datetime) -> datetime:
    return now.replace(microsecond=0)
