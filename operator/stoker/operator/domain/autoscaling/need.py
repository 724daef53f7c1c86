"""The smallest number of replicas that is predicted to meet the goals of a pool. Pure; called by `rule`."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from stoker.operator.domain.autoscaling.decision import Limits, PoolInput
from stoker.operator.domain.autoscaling.prediction import Goals, PoolModel, Prediction

BUSY = 0.8
"""Share of time that may be busy where no number of replicas meets the goal."""
MOST = 1 << 14
"""The search ends here, above any pool."""


@dataclass(frozen=True)
class Need:
    """Replicas to have, within the limits, and why."""

    replicas: int
    text: str
    prediction: Prediction | None = None
    infeasible: str | None = None


def needed_by_goals(limits: Limits, seen: PoolInput, share: float) -> Need:
    """The smallest number that meets `share` of each goal; where none meets the goals, the smallest that keeps up.

    Zero is needed where nothing runs or waits and `min` allows it. Without a measured curve the present number is.
    """
    if seen.idle:
        return Need(limits.min, "no requests")
    if seen.demand is None or seen.curve is None or seen.shape is None or not seen.demand.rate:
        return Need(max(seen.replicas, limits.min), "no step has been measured yet")
    model = PoolModel(seen.demand, seen.curve, seen.shape, seen.copies)
    best = model.alone().used(limits.goals)
    if best >= 1:
        return _keeping_up(limits, model)
    found = _smallest(model, limits, max(share, best + (1 - best) * share / 2))  # a tight goal leaves less to spare
    return Need(found, f"{found} needed for {seen.demand.rate:.3g} requests/s", model.at(found))


def _smallest(model: PoolModel, limits: Limits, share: float) -> int:
    """The smallest number that passes, by bisection: more replicas are never slower. It may lie above `max`."""
    low = high = max(limits.min, 1)
    while high < MOST and model.at(high).used(limits.goals) > share:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if model.at(middle).used(limits.goals) <= share else (middle + 1, high)
    return high


def _keeping_up(limits: Limits, model: PoolModel) -> Need:
    """The smallest number that keeps up with the work, and the best figures that any number can reach."""
    counts = range(max(limits.min, 1), limits.max + 1)
    place = bisect_left(counts, True, key=lambda count: _keeps_up(model.at(count)))  # a share of less work fits, too
    found = counts[place] if place < len(counts) else limits.max
    text = f"no number of replicas reaches {_goals(limits.goals)}: the best is {_reached(model.alone())}"
    return Need(found, f"{found} keep up with {model.demand.rate:.3g} requests/s", model.at(found), text)


def _keeps_up(predicted: Prediction) -> bool:
    return predicted.fits and predicted.busy <= BUSY


def _goals(goals: Goals) -> str:
    parts = []
    if goals.first_token_s is not None:
        parts.append(f"ttftMs {goals.first_token_s * 1000:.0f}")
    if goals.gap_s is not None:
        parts.append(f"itlMs {goals.gap_s * 1000:.0f}")
    return ", ".join(parts)


def _reached(best: Prediction) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in (("ttft", best.first_token_s), ("itl", best.gap_s)))


def _ms(seconds: float) -> str:
    return f"{float(f'{seconds * 1000:.2g}'):g} ms" if math.isfinite(seconds) else "out of reach"
