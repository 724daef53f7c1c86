"""Statuses of gangs that were just placed. They wait a moment to be written, because the next one follows.

A status costs the API server as much as three pods, and a gang that has its nodes passes through Pending and Starting
to Running. Each of these is written when it lasts: after three seconds, and later while many wait. What a person must
see at once is written at once: a gang without room, a pod that cannot start, every other phase.

A pass sees the status that waits as if it were written. One that is lost with this process is derived anew.

Owned by the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import Key, Object, Plan

SETTLE_S = 3.0
"""More than one round of polls, which find out that the pods train."""
WRITES_PER_S = 20.0
"""Of statuses that have waited; a burst of gangs takes longer than that to run, and then they wait longer."""
LONGEST_S = 15.0
_PASSING_PHASES = frozenset({"Pending", "Starting"})
_PASSING_REASONS = frozenset({"Placed", "WaitingForPods", "Starting"})


class _Held(NamedTuple):
    uid: str
    status: Object
    due_s: float


class SettlingStatuses:
    """The statuses that wait, one for each key at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[Key, _Held] = {}
        self._last_due_s = 0.0

    def shown(self, key: Key, resource: Object) -> Object:
        """Return the resource with the status that waits, if one does."""
        held = self._held.get(key)
        if held is None:
            return resource
        if held.uid != resource["metadata"]["uid"]:
            del self._held[key]
            return resource
        return {**resource, "status": held.status}

    def settled(self, key: Key, stored: Object, plan: Plan) -> Plan:
        """Return the plan without its status where that can wait, and with the one that waited where that is due.

        Args:
            stored: the resource with the status that was written last.
        """
        held = self._held.pop(key, None)
        status = plan.status if plan.status is not None or held is None else held.status
        if status is None or not can_wait(stored, replace(plan, status=status)):
            return replace(plan, status=status)
        now = self._clock.monotonic()
        due_s = held.due_s if held is not None else self._next_due(now)
        if now >= due_s:
            return replace(plan, status=status)
        self._held[key] = _Held(stored["metadata"]["uid"], status, due_s)
        waits = [due_s - now, *([plan.requeue_after_s] if plan.requeue_after_s is not None else [])]
        return replace(plan, status=None, requeue_after_s=min(waits))

    def forget(self, key: Key) -> None:
        """Drop what waits for a resource that is gone."""
        self._held.pop(key, None)

    def _next_due(self, now: float) -> float:
        self._last_due_s = min(max(now + SETTLE_S, self._last_due_s + 1 / WRITES_PER_S), now + LONGEST_S)
        return self._last_due_s


def can_wait(stored: Object, plan: Plan) -> bool:
    """Whether nothing depends on the plan's status yet: the attempt is placed and starts, and only its pods change."""
    old, new = stored.get("status") or {}, plan.status or {}
    if stored["kind"] != "TrainingJob" or stored["metadata"].get("deletionTimestamp"):
        return False
    if plan.create or plan.apply or plan.delete or plan.force_delete or plan.calls or plan.events or plan.generate:
        return False
    return _starts(old) and _starts(new) and _number(old) == _number(new) and bool(_attempt(new).get("placedAt"))


def _starts(status: Mapping[str, Any]) -> bool:
    reasons = {found["type"]: found["reason"] for found in status.get("conditions") or ()}
    return status.get("phase") in _PASSING_PHASES and reasons.get("Reconciling") in _PASSING_REASONS


def _attempt(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return status.get("attempt") or {}


def _number(status: Mapping[str, Any]) -> object:
    return _attempt(status).get("number")
