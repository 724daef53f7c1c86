"""The cheapest choice of what backward computes again, within a budget of bytes.

A layer has options: what it keeps, what backward needs beside that while it computes the layer again, and the work.
Backward runs from the last layer to the first and frees what it has passed. So the memory is fullest at some layer i:
what layers 1 to i keep, and what layer i computes again. For a given multiset of options the fullest moment is least
when layers with more to compute again come first.

Pure and exact: `choose_cheapest` is tested against all choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Cost:
    """Bytes and work of one layer with one option, in any unit."""

    kept: float
    again: float
    """What backward makes beside what is kept while it passes the layer."""
    work: float
    """Of computing it again."""


@dataclass(frozen=True)
class _Chosen:
    """Some first layers, as a chain from the last of them to the first."""

    kept: float
    work: float
    option: int = -1
    before: _Chosen | None = None


def fullest_moment(costs: Sequence[Cost]) -> float:
    """Return the most bytes in backward of layers in this order."""
    kept, most = 0.0, 0.0
    for cost in costs:
        kept += cost.kept
        most = max(most, kept + cost.again)
    return most


def choose_cheapest(options: Sequence[Cost], layers: int, room: float) -> list[int] | None:
    """Return the option of each layer with the least work in sum, or None where no choice fits the room.

    Of equal ones the choice that keeps less. The order of the layers is that of the least memory.

    Choices of the first layers grow by one layer at a time. One is left behind where another keeps no more for no more
    work, and where it can end in no less work than a choice that is known.
    """
    if not _fits(options, layers, room):
        return None
    useful = _useful(options)
    left_over = [options[number] for number in useful]
    most = min(_work_of_two(one, other, layers, room) for one in left_over for other in left_over)
    found = [[_Chosen(0.0, 0.0)], *([] for _ in range(layers))]
    for turn, number in enumerate(useful):
        cost, bound = options[number], _Bound(left_over[turn:], room, most)
        for count in range(layers + 1):
            before = found[count - 1] if count else []
            grown = [
                _Chosen(chosen.kept + cost.kept, chosen.work + cost.work, number, chosen)
                for chosen in before
                if chosen.kept + cost.kept + cost.again <= room
            ]
            hopeful = [chosen for chosen in found[count] + grown if bound.allows(chosen, layers - count)]
            found[count] = _best(hopeful)
    return _chain(min(found[layers], key=lambda chosen: (chosen.work, chosen.kept)))


class _Bound:
    """Tells which choices of some layers may grow to the least work of all with some options."""

    def __init__(self, options: Sequence[Cost], room: float, most: float) -> None:
        """`most`: the work of a choice that is known; infinite without one."""
        self._room, self._most = room, most * (1 + 1e-9)
        self._corners = corners(options)

    def allows(self, chosen: _Chosen, left: int) -> bool:
        return chosen.work + self._least(left, self._room - chosen.kept) <= self._most

    def _least(self, left: int, room: float) -> float:
        """No choice of so many layers has less work: as if parts of a layer could have different options."""
        if left == 0:
            return 0.0
        each, corners = room / left, self._corners
        if each < corners[0].kept * (1 - 1e-12):  # not for a rest of rounding
            return math.inf
        for low, high in pairwise(corners):
            if each < high.kept:
                share = (each - low.kept) / (high.kept - low.kept)
                return left * (low.work + share * (high.work - low.work))
        return left * corners[-1].work


def corners(options: Sequence[Cost]) -> list[Cost]:
    """Return the lower convex hull of work over kept bytes, as long as work falls."""
    hull: list[Cost] = []
    for cost in sorted(options, key=lambda cost: (cost.kept, cost.work)):
        if hull and cost.work >= hull[-1].work:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], cost):
            hull.pop()
        hull.append(cost)
    return hull


def slope(low: Cost, high: Cost) -> float:
    """Return the work that one more byte costs: negative where it saves some."""
    return (high.work - low.work) / (high.kept - low.kept)


def _work_of_two(one: Cost, other: Cost, layers: int, room: float) -> float:
    """The least work of some first layers with one option and the others with another; infinite where none fits."""
    works = [math.inf]
    for count in range(layers + 1):
        kept = count * one.kept
        fits = count == 0 or kept + one.again <= room
        if fits and (count == layers or layers * other.kept + count * (one.kept - other.kept) + other.again <= room):
            works.append(count * one.work + (layers - count) * other.work)
    return min(works)


def least_room(options: Sequence[Cost], layers: int) -> float:
    """Return the smallest room for which there is a choice, less than one byte too large."""
    low, high = 0.0, min(fullest_moment([cost] * layers) for cost in options)
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(options, layers, middle) else (middle, high)
    return high


def _fits(options: Sequence[Cost], layers: int, room: float) -> bool:
    """Whether there is a choice: by the least that so many first layers keep."""
    least = [0.0] + [math.inf] * layers
    for number in _useful(options):
        cost = options[number]
        for count in range(1, layers + 1):
            kept = least[count - 1] + cost.kept
            if kept + cost.again <= room:
                least[count] = min(least[count], kept)
    return least[layers] < math.inf


def _useful(options: Sequence[Cost]) -> list[int]:
    """The options that no other one beats in everything, in the order of their layers."""
    order = sorted(range(len(options)), key=lambda number: (-options[number].again, options[number].kept, number))
    return [number for number in order if not any(_beats(options, other, number) for other in order)]


def _beats(options: Sequence[Cost], one: int, other: int) -> bool:
    """Whether `one` is nowhere worse; of equal options the first one beats the others."""
    values: Callable[[Cost], tuple[float, ...]] = lambda cost: (cost.kept, cost.again, cost.work)  # noqa: E731
    a, b = values(options[one]), values(options[other])
    return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or one < other)


def _best(chosen: list[_Chosen]) -> list[_Chosen]:
    """Leave out what keeps more and costs more work than another choice."""
    left: list[_Chosen] = []
    for item in sorted(chosen, key=lambda one: (one.kept, one.work)):
        if not left or item.work < left[-1].work:
            left.append(item)
    return left


def _chain(last: _Chosen) -> list[int]:
    numbers = []
    item: _Chosen | None = last
    while item is not None and item.before is not None:
        numbers.append(item.option)
        item = item.before
    return numbers[::-1]
