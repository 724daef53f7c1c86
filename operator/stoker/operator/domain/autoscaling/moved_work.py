"""How much of their goals a prefill and a decode pool use where one does a part of the other's work. Pure.

Routers divide by predicted seconds: prompts stay at decode engines where prefill engines are full, and a prefill engine
answers whole requests where no decode engine takes them. So the sizes of two pools meet the goals together, not each
its own. Moved work counts as it was measured, and has to meet the goals of both pools: a prompt at a decode engine that
of the first token, an answer at a prefill engine that of the gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.prediction import Goals, PoolModel
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram

OVERFULL = 1e6
"""Added to the share of time that is busy where the work does not fit: more of a goal than any work that fits uses."""
HALVINGS = 6
"""Of the part of the work that moves, which is thus known to 2 %."""
PRICE = 1.1
"""Of moved work, more than of the same work at its own pool: prompts disturb answers, and no pair is sized for it."""
GRAINS = 10_000
"""Requests to which mixed histograms are scaled."""


@dataclass(frozen=True)
class PoolWork:
    """What one pool has to do, and its goals."""

    model: PoolModel
    goals: Goals

    def used(self, replicas: int, goals: Goals | None = None) -> float:
        """The share of the goals that so many replicas use; beyond `OVERFULL` where the work does not fit."""
        found = self.model.at(replicas)
        return found.used(goals or self.goals) if found.fits else OVERFULL + found.busy

    def without(self, part: float) -> PoolWork:
        """What is left when a part is done elsewhere."""
        demand = self.model.demand
        return replace(self, model=replace(self.model, demand=replace(demand, rate=demand.rate * (1 - part))))

    def with_part(self, other: PoolWork, part: float) -> PoolWork:
        """This work with a part of another pool's."""
        own, its = self.model, other.model
        curve = dearer(own.curve, its.curve)
        return replace(self, model=replace(own, demand=joined(own.demand, its.demand, PRICE * part), curve=curve))


@dataclass(frozen=True)
class PairWork:
    """What a prefill and a decode pool have to do together."""

    prefill: PoolWork
    decode: PoolWork

    @property
    def goals(self) -> Goals:
        """Those of both pools."""
        return Goals(self.prefill.goals.first_token_s, self.decode.goals.gap_s)

    def used(self, prefill: int, decode: int) -> float:
        """The larger of both pools' used shares, after the more pressed one has given away what makes it smallest."""
        return min(self._tried((self.prefill, prefill), (self.decode, decode)))

    def _tried(self, *pools: tuple[PoolWork, int]) -> Iterator[float]:
        """Yield it for no part and for those of a bisection: the giver uses less with each part, the taker more."""
        first, second = (pool.used(count) for pool, count in pools)
        yield max(first, second)
        (giver, few), (taker, many) = pools if first > second else pools[::-1]
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            part = (low + high) / 2
            gave, took = giver.without(part).used(few), taker.with_part(giver, part).used(many, self.goals)
            yield max(gave, took)
            low, high = (part, high) if gave > took else (low, part)


def dearer(own: StepCurve, other: StepCurve) -> StepCurve:
    """The curve of an engine for tokens of both kinds: of a kind that it has hardly computed it knows no price."""
    return StepCurve(
        own.base_s,
        max(own.prompt_token_s, other.prompt_token_s),
        max(own.decode_token_s, other.decode_token_s),
    )


def joined(own: Demand, other: Demand, part: float) -> Demand:
    """The demand of one pool with a part of another one's, or with more than that."""
    rate = own.rate + part * other.rate
    weight = part * other.rate / rate if rate else 0.0
    return Demand(
        rate,
        max(own.burstiness, other.burstiness),
        _mixed(own.uncached, other.uncached, weight),
        (1 - weight) * own.prompt + weight * other.prompt,
        (1 - weight) * own.output + weight * other.output,
    )


def _mixed(own: Histogram, other: Histogram, weight: float) -> Histogram:
    """Sizes of which a share comes from the other histogram."""
    mixed = Histogram()
    for found, share in ((own, 1 - weight), (other, weight)):
        grains = GRAINS * share / max(found.total, 1)
        for bucket, count in found.counts.items():
            mixed.put(bucket, round(grains * count))
    return mixed
