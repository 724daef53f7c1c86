"""A cheap choice for layers of several kinds, each in its place, within a budget of bytes.

`budget` is exact, but for layers that are alike. Here layers differ: the bound is what all of them keep and what one of
them computes again, and the work is at most one step of one layer above the least within that bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from stoker.pod.plan.budget import Cost, corners, slope

Options = Sequence[Cost]
"""Of one layer."""
Step = tuple[float, int, int, Cost, Cost]
"""Work by byte, layer, number of the step in the layer, and its ends: more is kept and less computed again."""


def choose_by_layer(layers: Sequence[Options], room: float) -> list[int] | None:
    """Return the option of each layer, or None where no choice fits the room."""
    found = []
    for limit in sorted({cost.again for options in layers for cost in options}):
        chosen = _within(layers, limit, room - limit)
        if chosen is not None:
            found.append((sum(cost.work for cost in chosen), limit, chosen))
    if not found:
        return None
    _, _, picked = min(found, key=lambda one: one[:2])
    return [list(options).index(cost) for options, cost in zip(layers, picked, strict=True)]


def least_room_by_layer(layers: Sequence[Options]) -> float:
    """Return the smallest room for which there is a choice."""
    return min(
        limit + sum(_least_kept(options, limit) for options in layers)
        for limit in {cost.again for options in layers for cost in options}
    )


def _least_kept(options: Options, limit: float) -> float:
    return min((cost.kept for cost in options if cost.again <= limit), default=math.inf)


def _within(layers: Sequence[Options], limit: float, room: float) -> list[Cost] | None:
    """Keep the least, then more where a byte saves most work, as long as it fits; none computes more than `limit`."""
    if sum(_least_kept(options, limit) for options in layers) > room:
        return None
    hulls = [corners([cost for cost in options if cost.again <= limit]) for options in layers]
    chosen = [hull[0] for hull in hulls]
    left = room - sum(cost.kept for cost in chosen)
    for _, layer, _, low, high in sorted(_steps(hulls), key=lambda step: step[:3]):
        if chosen[layer] == low and high.kept - low.kept <= left:
            chosen[layer] = high
            left -= high.kept - low.kept
    return chosen


def _steps(hulls: list[list[Cost]]) -> list[Step]:
    return [
        (slope(low, high), layer, number, low, high)
        for layer, hull in enumerate(hulls)
        for number, (low, high) in enumerate(pairwise(hull))
    ]
