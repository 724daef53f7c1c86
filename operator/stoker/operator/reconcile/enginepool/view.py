"""What an EnginePool's reconcile sees, sorted once: its pods with their revisions and reports, the routers that know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker.operator.api.enginepool import EnginePool, EngineStatus, Revision
from stoker.operator.api.metadata import read
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.labels import PREFIX
from stoker.operator.domain.plan import Object, Observed, Plan, Report
from stoker.operator.domain.pods import ended, is_ready, label
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.status_patch import settled
from stoker.operator.render.engine import engine_url

DRAINING = f"{PREFIX}/draining"
"""Label on an engine pod that gets no new request and goes when its last one is done."""
FAILURES_TO_STALL = 3
"""Engines that ended one after another, none of them ready: a person must look."""


@dataclass(frozen=True)
class PoolView:
    """Read-only; every decision of the reconcile is a function of it."""

    pool: EnginePool
    seen: Observed
    settings: Settings
    now: datetime
    pods: tuple[Object, ...]
    routers: tuple[Object, ...]
    """Ready ones."""

    @property
    def time(self) -> str:
        return timestamp(self.now)

    @property
    def target(self) -> Revision:
        """The revision with the largest share: what new pods are made of."""
        return max(self.pool.spec.revisions, key=lambda revision: revision.share)

    @property
    def serving(self) -> tuple[Object, ...]:
        """Pods that count: neither ended, nor draining, nor on their way out."""
        return tuple(p for p in self.pods if not ended(p) and not draining(p) and not leaving(p))

    def report(self, pod: Object) -> Report | None:
        return self.seen.reports.get(pod["metadata"]["uid"])

    def known(self, pod: Object) -> EngineStatus | None:
        """What the status says of this very pod."""
        uid = pod["metadata"]["uid"]
        return next((engine for engine in self.pool.status.engines if engine.uid == uid), None)


def look(seen: Observed, settings: Settings, now: datetime) -> PoolView:
    """Sort what is observed."""
    pool = read(EnginePool, seen.resource)
    uid = pool.metadata.uid
    pods = [pod for pod in seen.of_kind("Pod") if label(pod, "role") == "engine" and _owned(pod, uid)]
    routers = [pod for pod in seen.of_kind("Pod") if label(pod, "role") == "router" and is_ready(pod)]
    return PoolView(pool, seen, settings, now, tuple(pods), tuple(routers))


def settle(
    view: PoolView, changes: Mapping[str, Any], conditions: tuple[Condition, ...], plan: Plan | None = None
) -> Plan:
    """`plan` with the status that results from `changes`; the status is left out where nothing changes."""
    pool = view.pool
    return settled(plan, pool.status, changes, conditions, seen=view.seen, now=view.now)


def draining(pod: Object) -> bool:
    return DRAINING in pod["metadata"].get("labels", {})


def leaving(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def engine_status(view: PoolView, pod: Object) -> EngineStatus:
    """One line of the status."""
    report = view.report(pod)
    known = view.known(pod)
    body = report if report is not None else _as_known(known)
    asked = known.drain_requested_at if known else None
    return EngineStatus(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        revision=label(pod, "revision") or None,
        url=engine_url(pod, view.settings.engine_port),
        phase=_phase(pod, str(body.get("phase") or "Pending")),
        ready=is_ready(pod) and not ended(pod),
        draining=draining(pod),
        message=str(body.get("message") or "")[:1024] or None,
        drain_requested_at=(asked or view.time) if draining(pod) else None,
    )


def _as_known(known: EngineStatus | None) -> Mapping[str, Any]:
    """What an operator that has just started knows of a pod that it has not asked yet."""
    return {"phase": known.phase, "message": known.message} if known else {}


def _phase(pod: Object, reported: str) -> str:
    """Failed is said of a pod that has ended, and then its failure is counted; one that is about to end says Failing."""
    if ended(pod):
        return "Failed"
    return "Failing" if reported == "Failed" else reported


def _owned(pod: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())
