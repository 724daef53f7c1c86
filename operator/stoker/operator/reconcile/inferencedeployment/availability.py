"""How many replicas of a pool may be unavailable while a canary gives some of them no requests. Pure.

Called by `rollout` for each EnginePool. The pool cannot know: its revisions have shares of the replicas, not of the
traffic.
"""

from __future__ import annotations

import math

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.pool import Pool
from stoker.operator.domain.rollout.headroom import OVERLOAD
from stoker.operator.reconcile.enginepool.step import resolve
from stoker.operator.reconcile.inferencedeployment.canary import CanaryTurn
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, ready_by_revision


def max_unavailable(view: DeploymentView, pool: Pool, live: EnginePool, turn: CanaryTurn | None) -> int | str:
    """The limit of the pool, or a higher one while replicas are Ready that a canary leaves without requests.

    They are no capacity, so they go at once and leave their room to others. While a revision that has failed keeps a
    share, each replica may have `OVERLOAD` times its part, so as many go as this allows.
    """
    replicas, ready = live.spec.bounded_replicas, ready_by_revision(view, live)
    needed = replicas - resolve(pool.max_unavailable, replicas, up=False)
    if turn is None or turn.promoted or needed <= 0:
        return pool.max_unavailable
    kept = {name for name, _ in turn.shares}
    idle = sum(number - (name in kept) for name, number in ready.items() if name not in turn.serving)
    helping = turn.rolled_back and turn.status.percent > 0
    limits = (needed, math.ceil(replicas / OVERLOAD) if helping else needed, ready.total() - idle if idle else needed)
    return pool.max_unavailable if min(limits) == needed else replicas - min(limits)
