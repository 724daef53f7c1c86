"""Take a replica away without losing a request: cordon, wait for the routers, drain, delete all its pods. Pure.

Its leader answers requests, so the leader drains. Called by `replicas` for each replica that must go.
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
        leader = replica.first
        if _is_drained(view, leader) or _draining_for_s(view, leader) > view.settings.drain_timeout_s:
            gone.append(replica)
        elif _drain_was_requested(view, leader):
            continue
        elif _out_of_snapshots(view, leader) or _draining_for_s(view, leader) > view.settings.router_acknowledge_s:
            body = {"id": leader["metadata"]["uid"], "deadline_s": view.settings.drain_timeout_s}
            calls.append(ControlCall(ref_of(leader), "POST", "/drain", body))
    delete = [ref_of(pod) for replica in gone for pod in replica.pods if not leaving(pod)]
    return DrainStep(calls=tuple(calls), delete=tuple(delete), requeue_after_s=LOOK_AGAIN_S if waiting else None)


def least_loaded(view: PoolView, replicas: Sequence[Replica], number: int) -> tuple[Replica, ...]:
    """The `number` replicas with the fewest requests; among equals the first by name. Those that are lent go last."""

    def load(replica: Replica) -> tuple[bool, int, str]:
        report = view.report(replica.first) or {}
        requests = int(report.get("running") or 0) + int(report.get("waiting") or 0)
        return is_lent(replica.first), requests, replica.name

    return tuple(sorted(replicas, key=load)[:number])


def releasable(
    view: PoolView, ready: Sequence[Replica], surplus: Sequence[Replica], needed: int
) -> tuple[Replica, ...]:
    """The replicas of `surplus` that may be cordoned while `needed` stay that every Ready router has found healthy.

    A Ready replica gets requests only after the routers have probed it. Until then the one that it replaces must stay.
    """
    staying = [found for found in ready if found not in surplus and _is_admitted(view, found.first)]
    missing = max(needed - len(staying), 0)
    kept = sorted(surplus, key=lambda found: not _is_admitted(view, found.first))[:missing]
    return tuple(found for found in surplus if found not in kept)


def _is_admitted(view: PoolView, pod: Object) -> bool:
    """Whether every Ready router would send the pod a request."""
    uid = pod["metadata"]["uid"]
    backends = [(view.report(router) or {}).get("backends") or () for router in view.routers]
    return all(any(known.get("pod_uid") == uid and known.get("healthy") for known in seen) for seen in backends)


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
