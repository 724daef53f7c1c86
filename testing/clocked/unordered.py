"""The pool that knows what its trace has, but not in which order: the least replica hours to expect. Pure.

A burst is over before a replica that it asks for has started. So a rule has to choose a size before it knows what comes
next. This one has the best of all knowledge but that: it knows each part of the trace and which of them are still to
come. All orders are equally likely. It keeps one size for a part, and changes cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testing.clocked.foresight import PRICES


@dataclass(frozen=True)
class Expected:
    """Means over all orders of the parts."""

    replica_slots: float
    missed: float


def least_unordered(missed: Mapping[int, Sequence[int]], lengths: Sequence[int], allowed: float) -> Expected | None:
    """The fewest replica slots to expect where at most `allowed` missed requests are; None where no size allows it.

    Args:
        missed: for each size of a fixed pool, the requests that missed a goal in each part.
        lengths: slots of each part.

    For a price of a missed request the best size depends on the parts that are left alone, because each of them is as
    likely to come next. The price is found by bisection, as in `least_hours`.
    """
    left = _sums(missed, lengths)
    low, high, found = 0, len(PRICES), None
    while low < high:
        middle = (low + high) // 2
        expected = _expected_at(PRICES[middle], left, len(lengths))
        if expected.missed <= allowed:
            found, high = expected, middle
        else:
            low = middle + 1
    return found


@dataclass(frozen=True)
class _Left:
    """Sums over the parts that are left."""

    count: int
    slots: int
    missed: Mapping[int, int]


def _sums(missed: Mapping[int, Sequence[int]], lengths: Sequence[int]) -> list[_Left]:
    """For each set of parts, but the empty one."""
    made = []
    for count in range(1, len(lengths) + 1):
        for parts in itertools.combinations(range(len(lengths)), count):
            totals = {size: sum(found[part] for part in parts) for size, found in missed.items()}
            made.append(_Left(count, sum(lengths[part] for part in parts), totals))
    return made


def _expected_at(price: float, left: Sequence[_Left], parts: int) -> Expected:
    """With the best size for each set of parts; sets of equal number are equally likely."""
    slots = missed = 0.0
    for found in left:
        size = min(found.missed, key=lambda one: (one * found.slots + price * found.missed[one], one))
        weight = 1 / (math.comb(parts, found.count) * found.count)
        slots += weight * size * found.slots
        missed += weight * found.missed[size]
    return Expected(slots, missed)
