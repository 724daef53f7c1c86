"""The start of the newest replica in its parts, once it is ready. Pure; called by `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from stoker.operator.api.enginepool import ReplicaStart, StartParts
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Report
from stoker.operator.domain.pods import created_at, ready_at, scheduled_at, started_at
from stoker.operator.domain.startup import engine_start
from stoker.operator.reconcile.enginepool.replica import Replica, is_leader
from stoker.operator.reconcile.enginepool.view import PoolView

_STARTED = ("Serving", "Draining", "Drained")
"""Phases of an engine whose start is over."""


def last_start(view: PoolView) -> ReplicaStart | None:
    """The start of the newest replica by its creation; written once for each, and kept after the replica is gone."""
    known = view.pool.status.last_start
    found = [start for replica in view.replicas if (start := _start_of(view, replica, known)) is not None]
    newest = max(found, key=lambda start: (start.created_at, start.engine), default=None)
    if newest is None or (known is not None and newest.created_at <= known.created_at):
        return known
    return newest


def _start_of(view: PoolView, replica: Replica, known: ReplicaStart | None) -> ReplicaStart | None:
    """The start of a replica that is ready; None while a moment of it or the engine's report is missing."""
    leader = replica.first
    created = created_at(leader)
    if not replica.ready or not is_leader(leader) or created is None:
        return None
    if known is not None and timestamp(created) <= known.created_at:
        return None
    reported = _whole_report(view.report(leader) or {})
    started, ready = _last(map(started_at, replica.pods)), _last(map(ready_at, replica.pods))
    if not reported or started is None or ready is None:
        return None
    parts = engine_start(created, _last(map(scheduled_at, replica.pods)), started, reported, ready)
    return ReplicaStart(
        engine=leader["metadata"]["name"],
        uid=leader["metadata"]["uid"],
        created_at=timestamp(created),
        seconds=sum(parts.values()),
        parts=StartParts.model_validate(parts),
    )


def _whole_report(report: Report) -> Mapping[str, float]:
    """The engine's parts; empty in a report from before its end, which may still be the newest of a ready pod."""
    return (report.get("startup_s") or {}) if report.get("phase") in _STARTED else {}


def _last(moments: Iterable[datetime | None]) -> datetime | None:
    return max(filter(None, moments), default=None)
