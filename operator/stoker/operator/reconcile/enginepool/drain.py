"""Take an engine pod away without losing a request: cordon, wait for the routers, drain, delete. Pure.

Called by `replicas` for each pod that must go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker.operator.domain.plan import ControlCall, Object, Patch, Ref
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.enginepool.view import DRAINING, PoolView, draining, leaving

LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class DrainStep:
    """Calls and deletes that the pods being drained need now."""

    patch: tuple[Patch, ...] = ()
    calls: tuple[ControlCall, ...] = ()
    delete: tuple[Ref, ...] = ()
    requeue_after_s: float | None = None


def cordon_pods(pods: Sequence[Object]) -> tuple[Patch, ...]:
    """Label the pods as draining: the deployment's reconcile then takes them out of the routers' snapshot."""
    return tuple(Patch(ref_of(pod), {"metadata": {"labels": {DRAINING: "true"}}}) for pod in pods)


def advance_drains(view: PoolView, dropped: Sequence[Object]) -> DrainStep:
    """The next step for every cordoned pod.

    Args:
        dropped: pods that serve no request; they are deleted at once.
    """
    calls: list[ControlCall] = []
    delete = [ref_of(pod) for pod in dropped if not leaving(pod)]
    waiting = [pod for pod in view.pods if draining(pod) and not leaving(pod) and pod not in dropped]
    for pod in waiting:
        if _is_drained(view, pod) or _draining_for_s(view, pod) > view.settings.drain_timeout_s:
            delete.append(ref_of(pod))
        elif _drain_was_requested(view, pod):
            continue
        elif _out_of_snapshots(view, pod) or _draining_for_s(view, pod) > view.settings.router_acknowledge_s:
            body = {"id": pod["metadata"]["uid"], "deadline_s": view.settings.drain_timeout_s}
            calls.append(ControlCall(ref_of(pod), "POST", "/drain", body))
    return DrainStep(calls=tuple(calls), delete=tuple(delete), requeue_after_s=LOOK_AGAIN_S if waiting else None)


def least_loaded(view: PoolView, pods: Sequence[Object], number: int) -> tuple[Object, ...]:
    """The `number` pods with the fewest requests; among equals the first by name."""

    def load(pod: Object) -> tuple[int, str]:
        report = view.report(pod) or {}
        return int(report.get("running") or 0) + int(report.get("waiting") or 0), pod["metadata"]["name"]

    return tuple(sorted(pods, key=load)[:number])


def releasable_pods(
    view: PoolView, ready: Sequence[Object], surplus: Sequence[Object], needed: int
) -> tuple[Object, ...]:
    """The pods of `surplus` that may be cordoned while `needed` pods stay that every Ready router has found healthy.

    A Ready pod gets requests only after the routers have probed it. Until then the pod that it replaces must stay.
    """
    staying = [pod for pod in ready if pod not in surplus and _is_admitted(view, pod)]
    missing = max(needed - len(staying), 0)
    kept = sorted(surplus, key=lambda pod: not _is_admitted(view, pod))[:missing]
    return tuple(pod for pod in surplus if pod not in kept)


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
