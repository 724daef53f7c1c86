"""Taking an engine pod away without losing a request: cordon, wait for the routers, drain, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker.operator.domain.plan import Call, Object, Patch, Ref
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.enginepool.view import DRAINING, PoolView, draining, leaving

LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class DrainStep:
    """What the pods that leave need now."""

    patch: tuple[Patch, ...] = ()
    calls: tuple[Call, ...] = ()
    delete: tuple[Ref, ...] = ()
    requeue_after_s: float | None = None


def begin(pods: Sequence[Object]) -> tuple[Patch, ...]:
    """Cordon: the deployment's reconcile takes the pod out of the routers' snapshot."""
    return tuple(Patch(ref_of(pod), {"metadata": {"labels": {DRAINING: "true"}}}) for pod in pods)


def go_on(view: PoolView, gone: Sequence[Object]) -> DrainStep:
    """The next step for every cordoned pod. `gone` are pods that serve nobody and are deleted at once."""
    calls: list[Call] = []
    delete = [ref_of(pod) for pod in gone if not leaving(pod)]
    waiting = [pod for pod in view.pods if draining(pod) and not leaving(pod) and pod not in gone]
    for pod in waiting:
        if _drained(view, pod) or _since_s(view, pod) > view.settings.drain_timeout_s:
            delete.append(ref_of(pod))
        elif _asked(view, pod):
            continue
        elif _forgotten(view, pod) or _since_s(view, pod) > view.settings.router_acknowledge_s:
            body = {"id": pod["metadata"]["uid"], "deadline_s": view.settings.drain_timeout_s}
            calls.append(Call(ref_of(pod), "POST", "/drain", body))
    return DrainStep(calls=tuple(calls), delete=tuple(delete), requeue_after_s=LOOK_AGAIN_S if waiting else None)


def victims(view: PoolView, pods: Sequence[Object], number: int) -> tuple[Object, ...]:
    """The pods with the least work, oldest name first among equals."""

    def work(pod: Object) -> tuple[int, str]:
        report = view.report(pod) or {}
        return int(report.get("running") or 0) + int(report.get("waiting") or 0), pod["metadata"]["name"]

    return tuple(sorted(pods, key=work)[:number])


def replaceable(
    view: PoolView, ready: Sequence[Object], leaving_now: Sequence[Object], needed: int
) -> tuple[Object, ...]:
    """Those of `leaving_now` that may go while `needed` pods stay that every Ready router has found healthy.

    A pod that is Ready gets requests only once the routers have probed it; until then the pod that it replaces is needed.
    """
    staying = [pod for pod in ready if pod not in leaving_now and _admitted(view, pod)]
    missing = max(needed - len(staying), 0)
    kept = sorted(leaving_now, key=lambda pod: not _admitted(view, pod))[:missing]
    return tuple(pod for pod in leaving_now if pod not in kept)


def _admitted(view: PoolView, pod: Object) -> bool:
    """Every Ready router would send it a request."""
    uid = pod["metadata"]["uid"]
    backends = [(view.report(router) or {}).get("backends") or () for router in view.routers]
    return all(any(known.get("pod_uid") == uid and known.get("healthy") for known in seen) for seen in backends)


def _drained(view: PoolView, pod: Object) -> bool:
    return (view.report(pod) or {}).get("phase") == "Drained"


def _asked(view: PoolView, pod: Object) -> bool:
    return (view.report(pod) or {}).get("phase") in {"Draining", "Drained"}


def _forgotten(view: PoolView, pod: Object) -> bool:
    """Every Ready router has taken a snapshot in which the pod gets nothing new."""
    return all(_knows_better(view, router, pod["metadata"]["uid"]) for router in view.routers)


def _knows_better(view: PoolView, router: Object, pod_uid: str) -> bool:
    report = view.report(router)
    if report is None or "backends" not in report:
        return False
    known = [backend for backend in report.get("backends") or () if backend.get("pod_uid") == pod_uid]
    return all(backend.get("draining") for backend in known)


def _since_s(view: PoolView, pod: Object) -> float:
    known = view.known(pod)
    if known is None or known.drain_requested_at is None:
        return 0.0
    return (view.now - datetime.fromisoformat(known.drain_requested_at)) / timedelta(seconds=1)
