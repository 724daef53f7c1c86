"""The places of weight-gradient products in a zero-bubble schedule: a rank runs them where it would wait.

A list scheduler: ranks act in the order of time. A rank whose next pass is not ready yet, or whose memory is full,
takes the oldest product that it has kept; what is left at the end follows the last pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stoker.pod.pipeline.actions import Action, Kind, Shape
from stoker.pod.pipeline.simulation import UNIT, Costs, needs


def fill_with_weights(
    fixed: Sequence[Sequence[Action]], shape: Shape, live_limit: int, costs: Costs = UNIT
) -> list[list[Action]]:
    """Return `fixed` (FORWARD and BACKWARD_INPUT by rank) with a BACKWARD_WEIGHT for each BACKWARD_INPUT.

    A rank that holds the activations of `live_limit` micro-batches runs no further FORWARD.
    """
    ends: dict[Action, float] = {}
    ranks = [_Rank(order, live_limit) for order in fixed]
    while any(rank.has_work for rank in ranks):
        starts = [rank.next_start(ends, shape) for rank in ranks]
        first = min(range(len(ranks)), key=lambda index: starts[index])
        if starts[first] == float("inf"):
            raise ValueError("pipeline: the order of passes has a deadlock")
        ranks[first].act(ends, shape, costs)
    return [rank.order for rank in ranks]


class _Rank:
    """One rank while its list is made."""

    def __init__(self, fixed: Sequence[Action], live_limit: int) -> None:
        self.order: list[Action] = []
        self._left = deque(fixed)
        self._kept: deque[Action] = deque()
        self._clock = 0.0
        self._live, self._limit = 0, live_limit

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._kept)

    def next_start(self, ends: dict[Action, float], shape: Shape) -> float:
        """When its next action can begin; infinity while that is not known."""
        if self._kept:
            return self._clock
        return self._pass_start(ends, shape) if self._left else float("inf")

    def act(self, ends: dict[Action, float], shape: Shape, costs: Costs) -> None:
        start = self._pass_start(ends, shape)
        action = self._kept.popleft() if self._kept and start > self._clock else self._left.popleft()
        self._clock = (self._clock if action.kind is Kind.BACKWARD_WEIGHT else start) + costs.of(action)
        ends[action] = self._clock
        self.order.append(action)
        self._count(action)

    def _pass_start(self, ends: dict[Action, float], shape: Shape) -> float:
        if not self._left or (self._left[0].kind is Kind.FORWARD and self._live >= self._limit):
            return float("inf")
        found = [ends.get(needed, float("inf")) for needed in needs(self._left[0], shape)]
        return max([self._clock, *found])

    def _count(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._live += 1
        elif action.kind is Kind.BACKWARD_INPUT:
            self._kept.append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.micro_batch))
        else:
            self._live -= 1
