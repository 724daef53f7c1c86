"""The start of the running attempt in its parts, once its first step is done. Pure; called by `status`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from stoker.operator.api.trainingjob_status import Attempt, Startup
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.pods import ended, exit_of, scheduled_at, started_at
from stoker.operator.domain.startup import broken_down
from stoker.operator.reconcile.trainingjob.attempt import gang_size, moment
from stoker.operator.reconcile.trainingjob.outcome import changed_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView

_REPORTED = {"start": "started_at", "rendezvous": "joined_at", "load": "loaded_at", "first_step": "stepped_at"}
"""Parts whose end the leader's agent reports, with the name of the moment."""


def with_startup(view: TrainingView, attempt: Attempt | None) -> Attempt | None:
    """The attempt with the parts of its start; written once, when all of them are known."""
    reported = _reported(view)
    whole = attempt is not None and len(view.gang) == gang_size(view)
    if attempt is None or not whole or attempt.startup or not attempt.started_at or "stepped_at" not in reported:
        return attempt
    ends = {
        "queue": _placed_at(view, attempt),
        "schedule": max(filter(None, map(scheduled_at, view.gang)), default=None),
        "pull": max(filter(None, map(started_at, view.gang)), default=None),
        **{part: _time(reported, name) for part, name in _REPORTED.items()},
    }
    seconds = broken_down(moment(attempt.started_at), ends, float(reported.get("compile_s") or 0.0))
    return changed_attempt(attempt, startup=Startup.model_validate(seconds))


def _reported(view: TrainingView) -> Mapping[str, float]:
    """The moments of the newest report, or of the leader's termination message: a short run ends before a poll."""
    message = exit_of(view.leader).message if view.leader and ended(view.leader) else None
    last = message.result.get("startup") if message and message.result else None
    return last or (view.report or {}).get("startup") or {}


def _placed_at(view: TrainingView, attempt: Attempt) -> datetime | None:
    """When our own queue was left. Pods that nothing held have none; time in Kueue's queue is part of `schedule`."""
    placed = attempt.placed_at is not None and any(map(pinned_node, view.gang))
    return moment(attempt.placed_at) if placed and attempt.placed_at else None


def _time(reported: Mapping[str, float], name: str) -> datetime | None:
    return datetime.fromtimestamp(reported[name], UTC) if name in reported else None
