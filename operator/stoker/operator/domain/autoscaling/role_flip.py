"""Replicas that change their role before others are started: the reviews of a prefill and a decode pool, joined. Pure.

1. A pool that needs more takes what the other one has to spare: replicas without which it was predicted to meet its
   goals for as long as a start takes, never its last one nor one below its `min`.
2. A pool that needs more gets its own replicas back, also where the other one still needs them.
3. A pool that needs fewer gives back what it has borrowed before it drains one of its own.

A flip takes seconds, a start minutes. What flips do not cover is started as before.
Called by the loop's `LoadWatch` with both reviews of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.decision import Decision, Limits, Memory, PoolInput

GROWING = frozenset({"Load", "Missed", "WaitingForRoom", "Wake"})
"""Reasons of a decision for which a replica may come from the other pool."""


@dataclass(frozen=True)
class Reviewed:
    """A pool's review: its input and its results."""

    limits: Limits
    seen: PoolInput
    decision: Decision
    memory: Memory


def flip_roles(now_s: float, one: Reviewed, other: Reviewed) -> tuple[Decision, Decision]:
    """The decisions of both pools, with the replicas that change their role."""
    if one.seen.unknown or other.seen.unknown:
        return one.decision, other.decision
    if count := _to_take(now_s, one, other) or _to_give_back(other, one):
        return _flipped(one, other, count)
    if count := _to_take(now_s, other, one) or _to_give_back(one, other):
        return _flipped(other, one, count)[::-1]
    return one.decision, other.decision


def _to_take(now_s: float, taker: Reviewed, giver: Reviewed) -> int:
    """Replicas of the giver that serve the taker from now on."""
    own = min(taker.seen.lent, _above_least(giver))
    return min(_missing(taker), max(_spare(now_s, giver), own))


def _to_give_back(giver: Reviewed, taker: Reviewed) -> int:
    """Borrowed replicas of a giver that needs fewer."""
    too_many = max(giver.decision.before - giver.decision.after, 0)
    return min(too_many, giver.seen.borrowed, max(taker.limits.max - taker.decision.before, 0))


def _missing(pool: Reviewed) -> int:
    """Replicas that the pool would get if there were room for them."""
    decision, before = pool.decision, pool.decision.before
    if decision.reason not in GROWING:
        return 0
    needed = min(decision.needed or 0, pool.limits.max, max(2 * before, before + 1))
    return max(decision.after, needed) - before


def _spare(now_s: float, pool: Reviewed) -> int:
    """Ready replicas that were not needed for as long as a start takes, nor at any time of the running proof."""
    since_s = pool.memory.since_s
    proof_s = min(pool.limits.scale_down_after_s, pool.seen.startup_s)
    if pool.decision.after > pool.decision.before or since_s is None or now_s - since_s < proof_s:
        return 0
    needed = max((need for _, need in pool.memory.needs), default=pool.seen.replicas)
    return max(min(_above_least(pool), pool.seen.replicas - needed), 0)


def _above_least(pool: Reviewed) -> int:
    """Ready replicas above `min`, without the last one."""
    return max(min(pool.seen.ready, pool.seen.replicas) - max(pool.limits.min, 1), 0)


def _flipped(taker: Reviewed, giver: Reviewed, count: int) -> tuple[Decision, Decision]:
    """Both decisions. What the taker needs beyond `count` is started, and a giver that grows itself starts more."""
    took, gave = taker.decision, giver.decision
    replicas = "1 replica changes its role" if count == 1 else f"{count} replicas change their role"
    more = replace(
        took, after=max(took.after, took.before + count), reason="RoleFlip", flips=count,
        message=f"{took.message}; {replicas} to serve this pool",
    )  # fmt: skip
    less = replace(
        gave, after=gave.after if gave.after > gave.before else gave.before - count, reason="RoleFlip", flips=-count,
        message=f"{gave.message}; {replicas} to serve the other pool",
    )  # fmt: skip
    return more, less
