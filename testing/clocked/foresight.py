"""The pool that knows its trace: the least replica hours that keep a share of requests within the goals.

It orders replicas one start-up before they are needed, pays for their start, and never orders two changes of direction
within the rest. The rule of the autoscaler cannot reach it; the difference is what a rule can gain at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PRICES = [10 ** (step / 30) for step in range(-60, 120)]
"""Replica slots that one missed request may cost."""


@dataclass(frozen=True)
class Plan:
    """Ready replicas in each slot of time."""

    sizes: tuple[int, ...]
    missed: int
    startup_slots: int = 0

    @property
    def cost(self) -> int:
        """Replica slots, those of starts included."""
        rises = (max(after - before, 0) for before, after in itertools.pairwise(self.sizes))
        return sum(self.sizes) + self.startup_slots * sum(rises)

    def orders(self, slot_s: float) -> list[tuple[float, int]]:
        """The changes in the order of their times: (seconds, change of the number of replicas)."""
        changes = [(slot, after - before) for slot, (before, after) in enumerate(itertools.pairwise(self.sizes), 1)]
        return sorted(
            ((slot - (self.startup_slots if change > 0 else 0)) * slot_s, change) for slot, change in changes if change
        )


class _State(NamedTuple):
    """The end of a plan: its size, where it went last (1 up, -1 down, 0 nowhere yet), and the slots since it turned."""

    size: int
    direction: int
    since: int
    """Since the order of the turn, which is one start-up before a larger pool is ready."""


def least_hours(
    missed: Mapping[int, Sequence[int]], allowed: int, rest_slots: int, startup_slots: int = 0
) -> Plan | None:
    """The cheapest plan found that misses at most `allowed` requests; None where none does.

    Args:
        missed: for each size of a fixed pool, the requests that missed a goal in each slot.
        rest_slots: at most one change of direction is ordered in that many slots.
        startup_slots: slots from the order of a replica until it is ready, which cost as much as ready ones.

    A plan for each price of a missed request is the best for that price (dynamic programming over size, direction and
    slots since the last turn). A higher price never misses more and never costs less, so the lowest price that is
    allowed is found by bisection; its plan is at most one step of the prices from the optimum.
    """
    low, high = 0, len(PRICES)
    found: Plan | None = None
    while low < high:
        middle = (low + high) // 2
        plan = _best_at(PRICES[middle], missed, rest_slots, startup_slots)
        if plan.missed <= allowed:
            found, high = plan, middle
        else:
            low = middle + 1
    return found


def _best_at(price: float, missed: Mapping[int, Sequence[int]], rest_slots: int, startup_slots: int) -> Plan:
    slots = len(next(iter(missed.values())))
    costs: dict[_State, tuple[float, tuple[int, ...]]] = {
        _State(size, 0, 0): (size + price * found[0], (size,)) for size, found in missed.items()
    }
    for slot in range(1, slots):
        following: dict[_State, tuple[float, tuple[int, ...]]] = {}
        for state, (cost, path) in costs.items():
            for size, found in missed.items():
                if size > state.size and slot < startup_slots:
                    continue  # it would have to be ordered before the trace begins
                after = _after(state, size, rest_slots, startup_slots)
                whole = cost + size + startup_slots * max(size - state.size, 0) + price * found[slot]
                if after is not None and (after not in following or whole < following[after][0]):
                    following[after] = whole, (*path, size)
        costs = following
    _, sizes = min(costs.values())
    return Plan(sizes, sum(missed[size][slot] for slot, size in enumerate(sizes)), startup_slots)


def _after(state: _State, size: int, rest_slots: int, startup_slots: int) -> _State | None:
    """The state after a slot of `size` replicas; None where the pool would turn too soon."""
    direction = state.direction if size == state.size else 1 if size > state.size else -1
    ahead = startup_slots if direction > 0 else 0
    if direction == state.direction:
        return _State(size, direction, min(state.since + 1, rest_slots + startup_slots) if direction else 0)
    if not state.direction:
        return _State(size, direction, rest_slots + startup_slots)  # the first change is no turn
    return _State(size, direction, 1 + ahead) if state.since - ahead >= rest_slots else None
