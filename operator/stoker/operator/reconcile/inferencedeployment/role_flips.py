"""The pods whose role changes now, by the autoscaler's decisions about a prefill and a decode pool. Pure.

A flip is a label on a ready engine pod. The snapshot of backends then has its new role, the routers send it other work,
and what it had goes on to its end. Called by `reconcile`; `autoscaling` counts with the same labels.
"""

from __future__ import annotations

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.pool import Pool, flipping_pools
from stoker.operator.domain.autoscaling.decision import Decision
from stoker.operator.domain.labels import LENT_TO, POOL
from stoker.operator.domain.lent_pods import count_borrowed, count_lent, is_lent, served_pool
from stoker.operator.domain.plan import Object, Patch
from stoker.operator.domain.pods import ended, is_ready, label, ref_of
from stoker.operator.reconcile.enginepool.replica import draining, leaving
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView


def plan_flips(view: DeploymentView) -> tuple[Patch, ...]:
    """The labels to write: of new flips, and of pods whose pools may not lend any more."""
    pools = flipping_pools(view.deployment.spec.pools)
    if pools is None:
        return tuple(_patch(pod, None) for pod in view.engines if is_lent(pod))
    for taker, giver in (pools, pools[::-1]):
        takes, gives = fresh_decision(view, taker), fresh_decision(view, giver)
        if takes is not None and gives is not None and takes.flips > 0:
            return tuple(
                _patch(pod, None if label(pod, POOL) == taker.name else taker.name)
                for pod in _candidates(view, taker, giver)[: takes.flips]
            )
    return ()


def serving_replicas(view: DeploymentView, pool: Pool, live: EnginePool) -> int:
    """The replicas that serve a pool: its own, with the borrowed ones and without the lent ones."""
    return live.spec.replicas + count_borrowed(view.engines, pool.name) - count_lent(view.engines, pool.name)


def fresh_decision(view: DeploymentView, pool: Pool) -> Decision | None:
    """The newest decision about the pool; None where it was about another number of replicas than there is now."""
    live, scaling = view.engine_pool(pool), view.seen.scaling.get(pool.name)
    if live is None or scaling is None or scaling.newest.before != serving_replicas(view, pool, live):
        return None
    return scaling.newest


def _candidates(view: DeploymentView, taker: Pool, giver: Pool) -> list[Object]:
    """Ready pods that serve the giver: those of the taker first, then those with the fewest requests."""
    found = [pod for pod in view.engines if served_pool(pod) == giver.name and is_ready(pod) and not ended(pod)]

    def order(pod: Object) -> tuple[bool, int, str]:
        report = view.seen.reports.get(pod["metadata"]["uid"]) or {}
        requests = int(report.get("running") or 0) + int(report.get("waiting") or 0)
        return label(pod, POOL) != taker.name, requests, pod["metadata"]["name"]

    return sorted((pod for pod in found if not draining(pod) and not leaving(pod)), key=order)


def _patch(pod: Object, pool: str | None) -> Patch:
    return Patch(ref_of(pod), {"metadata": {"labels": {LENT_TO: pool}}})
