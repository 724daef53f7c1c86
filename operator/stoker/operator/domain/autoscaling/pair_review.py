"""One review of a prefill and a decode pool together: what each may have, what it does for the other, who flips. Pure.

Each pool is reviewed by `rule`. Before that `pair_sizes` looks whether both needs can be had, within `max` and out of
the same nodes. Where they cannot, each pool gets its part of the room, and the one that can grow a need for work that
the other has no replicas for. Everything else of the rule holds as for a pool alone: step limits, proofs, at most one
change of direction in ten minutes, holds on unknown inputs.

Called by the loop's `LoadWatch` and by the clocked simulation, each `REVIEW_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.decision import Limits, Memory, PoolInput
from stoker.operator.domain.autoscaling.moved_work import PairWork, PoolWork
from stoker.operator.domain.autoscaling.need import Need
from stoker.operator.domain.autoscaling.pair_sizes import Bounds, PairRoom, choose_sizes
from stoker.operator.domain.autoscaling.prediction import PoolModel
from stoker.operator.domain.autoscaling.role_flip import Reviewed, flip_roles
from stoker.operator.domain.autoscaling.rule import UP_SHARE, needs_of, review


@dataclass(frozen=True)
class Member:
    """One pool before its review."""

    limits: Limits
    seen: PoolInput
    memory: Memory
    gpus: int = 1
    """Of a replica."""

    @property
    def work(self) -> PoolWork | None:
        """What it has to do; None while that is not known well enough to compare sizes."""
        seen = self.seen
        known = self.limits.mode == "slo" and not seen.unknown and seen.replicas
        if not known or seen.demand is None or seen.curve is None or seen.shape is None or not seen.demand.rate:
            return None
        return PoolWork(PoolModel(seen.demand, seen.curve, seen.shape, seen.copies), self.limits.goals)


def review_pair(
    now_s: float, prefill: Member, decode: Member, beside: Sequence[int] | None = None, *, flips: bool = False
) -> tuple[Reviewed, Reviewed]:
    """Decide the numbers of replicas of both pools now.

    Args:
        beside: by the number of further prefill replicas, how many further decode replicas have room, too; None where
            that is not known.
        flips: whether replicas can change their role.
    """
    prefill, decode = with_parts(prefill, decode, beside, flips=flips)
    one, other = reviewed(now_s, prefill), reviewed(now_s, decode)
    if not flips:
        return one, other
    decisions = flip_roles(now_s, one, other)
    return replace(one, decision=decisions[0]), replace(other, decision=decisions[1])


def with_parts(prefill: Member, decode: Member, beside: Sequence[int] | None, *, flips: bool) -> tuple[Member, Member]:
    """Both pools with their parts of the room, and with what each does for the other; as they are where each can have
    its own need, or where that is not known."""
    work, other = prefill.work, decode.work
    needs = needs_of(prefill.limits, prefill.seen)[0].up, needs_of(decode.limits, decode.seen)[0].up
    if work is None or other is None or any(need.infeasible for need in needs):
        return prefill, decode
    bounds = _bounds(prefill, needs[0]), _bounds(decode, needs[1])
    room = PairRoom(*bounds, beside, flips)
    if room.suffices:
        return prefill, decode
    sizes = choose_sizes(PairWork(work, other), room, UP_SHARE)
    relieves = (not flips or sizes.decode == decode.limits.max), (not flips or sizes.prefill == prefill.limits.max)
    return (
        _with_part(prefill, bounds[0], sizes.prefill, sizes.asks[0], relieves=relieves[0]),
        _with_part(decode, bounds[1], sizes.decode, sizes.asks[1], relieves=relieves[1]),
    )


def _bounds(pool: Member, need: Need) -> Bounds:
    return Bounds(pool.seen.replicas, pool.limits.max, need.replicas, pool.gpus)


def _with_part(pool: Member, bounds: Bounds, size: int, more: int, *, relieves: bool) -> Member:
    """The pool with its part. It does work of the other one only where that cannot take the replica itself."""
    relief = size if relieves and size > bounds.need else 0
    limits = replace(pool.limits, beside_other=max(size, bounds.present) + more)
    return replace(pool, limits=limits, seen=replace(pool.seen, relief=relief))


def reviewed(now_s: float, pool: Member) -> Reviewed:
    """Review one pool by itself."""
    decision, memory = review(now_s, pool.limits, pool.seen, pool.memory)
    return Reviewed(pool.limits, pool.seen, decision, memory)
