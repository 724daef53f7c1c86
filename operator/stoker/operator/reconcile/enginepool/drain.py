"""Take a replica away without losing a request: cordon, wait for the routers, drain, delete all its pods. Pure.

The pods that answer requests drain: its leader, or one of each data-parallel rank.

Called by `replicas` for each replica that must go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker.operator.domain.labels import DRAINING
from stoker.operator.domain.lent_pods import is_lent
from stoker.operator.domain.plan import ControlCall, Object, Patch, Ref
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.enginepool.replica import Replica, leaving
from stoker.operator.reconcile.enginepool.view import PoolView

LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class DrainStep:
    """Calls and deletes that the pods being drained need now."""

    patch: tuple[Patch, ...] = ()
    calls: tuple[ControlCall, ...] = ()
    delete: tuple[Ref, ...] = ()
    requeue_after_s: float | None = None


def cordon(replicas: Sequence[Replica]) -> tuple[Patch, ...]:
    """Label the replicas as draining: the deployment's reconcile then takes them out of the routers' snapshot."""
    body = {"metadata": {"labels": {DRAINING: "true"}}}
    return tuple(Patch(ref_of(pod), body) for replica in replicas for pod in replica.pods)


def advance_drains(view: PoolView, dropped: Sequence[Replica]) -> DrainStep:
    """The next step for every cordoned replica.

    Args:
        dropped: replicas that serve no request; all their pods are deleted at once.
    """
    calls: list[ControlCall] = []
    gone = list(dropped)
    waiting = [found for found in view.replicas if found.draining and not found.leaving and found not in dropped]
    for replica in waiting:
        if all(_is_over(view, pod) for pod in replica.endpoints):
            gone.append(replica)
        else:
            calls += (call for pod in replica.endpoints if (call := _drain_call(view, pod)) is not None)
    delete = [ref_of(pod) for replica in gone for pod in replica.pods if not leaving(pod)]
    return DrainStep(calls=tuple(calls), delete=tuple(delete), requeue_after_s=LOOK_AGAIN_S if waiting else None)


def _is_over(view: PoolView, pod: Object) -> bool:
    """Whether a pod has no request left, or had time enough."""
    return _is_drained(view, pod) or _draining_for_s(view, pod) > view.settings.drain_timeout_s


def _drain_call(view: PoolView, pod: Object) -> ControlCall | None:
    """The request to drain, once no router sends the pod new requests; None before, and where it drains already."""
    if _drain_was_requested(view, pod):
        return None
    if _out_of_snapshots(view, pod) or _draining_for_s(view, pod) > view.settings.router_acknowledge_s:
        body = {"id": pod["metadata"]["uid"], "deadline_s": view.settings.drain_timeout_s}
        return ControlCall(ref_of(pod), "POST", "/drain", body)
    return None


def least_loaded(view: PoolView, replicas: Sequence[Replica], number: int) -> tuple[Replica, ...]:
    """The `number` replicas with the fewest requests; among equals the first by name. Those that are lent go last."""

    def load(replica: Replica) -> tuple[bool, int, str]:
        reports = [view.report(pod) or {} for pod in replica.endpoints]
        requests = sum(int(report.get(name) or 0) for report in reports for name in ("running", "waiting"))
        return is_lent(replica.first), requests, replica.name

    return tuple(sorted(replicas, key=load)[:number])


def releasable(
    view: PoolView, ready: Sequence[Replica], surplus: Sequence[Replica], needed: int
) -> tuple[Replica, ...]:
    """The replicas of `surplus` that may be cordoned while `needed` stay that every Ready router has found healthy.

    A Ready replica gets requests only after the routers have probed it. Until then the one that it replaces must stay.
    """
    staying = [found for found in ready if found not in surplus and _is_admitted(view, found)]
    missing = max(needed - len(staying), 0)
    kept = sorted(surplus, key=lambda found: not _is_admitted(view, found))[:missing]
    return tuple(found for found in surplus if found not in kept)


def not_admitted(view: PoolView) -> str:
    """The first Ready replica that a Ready router has not told to be healthy, and that router; empty without one."""
    for replica in view.serving:
        if not replica.ready or replica.revision not in view.shared or _is_admitted(view, replica):
            continue
        uids = {pod["metadata"]["uid"] for pod in replica.endpoints}
        router = next(found for found in view.routers if not uids <= _healthy(view, found))
        return f"router {router['metadata']['name']} has not reported to reach replica {replica.name}"
    return ""


def _is_admitted(view: PoolView, replica: Replica) -> bool:
    """Whether every Ready router would send each of its endpoints a request."""
    uids = {pod["metadata"]["uid"] for pod in replica.endpoints}
    return all(uids <= _healthy(view, router) for router in view.routers)


def _healthy(view: PoolView, router: Object) -> set[str]:
    """Uids of the endpoints that a router has reached, by its newest report."""
    seen = (view.report(router) or {}).get("backends") or ()
    return {str(known.get("pod_uid")) for known in seen if known.get("healthy")}


def _is_drained(view: PoolView, pod: Object) -> bool:
    return (view.report(pod) or {}).get("phase") == "Drained"


def _drain_was_requested(view: PoolView, pod: Object) -> bool:
    return (view.report(pod) or {}).get("phase") in {"Draining", "Drained"}


def _out_of_snapshots(view: PoolView, pod: Object) -> bool:
    """Whether every Ready router has taken a snapshot in which the pod gets no new request."""
    return all(_sends_nothing_new(view, router, pod["metadata"]["uid"]) for router in view.routers)


def _sends_nothing_new(view: PoolView, router: Object, pod_uid: str) -> bool:
    report = view.report(router)
    if report is None or "backends" not in report:
        return False
    known = [backend for backend in report.get("backends") or () if backend.get("pod_uid") == pod_uid]
    return all(backend.get("draining") for backend in known)


def _draining_for_s(view: PoolView, pod: Object) -> float:
    known = view.known(pod)
    if known is None or known.drain_requested_at is None:
        return 0.0
    return (view.now - datetime.fromisoformat(known.drain_requested_at)) / timedelta(seconds=1)
