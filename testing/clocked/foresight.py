"""What a pool would cost that knows its trace: the least replica hours that keep a share of requests within the goals.

It starts replicas at once, and never changes direction twice within `rest_slots`. No rule reaches that; it says how
much of a missed bar is the rule's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

PRICES = [10 ** (step / 30) for step in range(-60, 120)]
"""Replica slots that one missed request may cost."""


class Plan(NamedTuple):
    """Replicas in each slot of time."""

    sizes: tuple[int, ...]
    missed: int

    @property
    def cost(self) -> int:
        """Replica slots."""
        return sum(self.sizes)


class _State(NamedTuple):
    """The end of a plan: its size, where it went last (1 up, -1 down, 0 nowhere yet), and the slots since it turned."""

    size: int
    direction: int
    since: int


def least_hours(missed: Mapping[int, Sequence[int]], allowed: int, rest_slots: int) -> Plan | None:
    """The cheapest plan found that misses at most `allowed` requests; None where none does.

    Args:
        missed: for each size of a fixed pool, the requests that missed a goal in each slot.
        rest_slots: at most one change of direction in that many slots.

    A plan for each price of a missed request is the best for that price (dynamic programming over size, direction and
    slots since the last turn); the cheapest of them that is allowed is at most one step of the prices from the optimum.
    """
    plans = [_best_at(price, missed, rest_slots) for price in PRICES]
    fitting = [plan for plan in plans if plan.missed <= allowed]
    return min(fitting, key=lambda plan: plan.cost) if fitting else None


def _best_at(price: float, missed: Mapping[int, Sequence[int]], rest_slots: int) -> Plan:
    slots = len(next(iter(missed.values())))
    costs: dict[_State, tuple[float, tuple[int, ...]]] = {
        _State(size, 0, rest_slots): (size + price * found[0], (size,)) for size, found in missed.items()
    }
    for slot in range(1, slots):
        following: dict[_State, tuple[float, tuple[int, ...]]] = {}
        for state, (cost, path) in costs.items():
            for size, found in missed.items():
                after = _after(state, size, rest_slots)
                whole = cost + size + price * found[slot]
                if after is not None and (after not in following or whole < following[after][0]):
                    following[after] = whole, (*path, size)
        costs = following
    _, sizes = min(costs.values())
    return Plan(sizes, sum(missed[size][slot] for slot, size in enumerate(sizes)))


def _after(state: _State, size: int, rest_slots: int) -> _State | None:
    """The state after a slot of `size` replicas; None where the pool would turn too soon."""
    direction = state.direction if size == state.size else 1 if size > state.size else -1
    if not state.direction or direction == state.direction:
        return _State(size, direction, min(state.since + 1, rest_slots))
    return _State(size, direction, 1) if state.since >= rest_slots else None
