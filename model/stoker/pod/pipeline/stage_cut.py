"""The cut of a model's layers into pipeline stages: runs of neighbouring layers whose costs are as even as they can be.

The first stage also computes the embedding, the last one the final norm, the output layer and the loss. Costs are
floating-point operations per token, or measured seconds: only their ratios count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Cost of each part of a model, forward and backward together, in any one unit."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0
    """Final norm, output layer and loss."""

    def of_stages(self, stages: Sequence[range]) -> tuple[float, ...]:
        """Cost of each stage of a cut."""
        costs = [sum(self.layers[layer] for layer in stage) for stage in stages]
        costs[0] += self.embedding
        costs[-1] += self.head
        return tuple(costs)


Best = tuple[float, float, tuple[int, ...]]
"""Cost of the dearest stage, sum of the squared costs, and the bounds of the stages so far."""


@lru_cache(maxsize=64)
def cut_layers(costs: LayerCosts, num_stages: int) -> tuple[range, ...]:
    """Return each stage's layers: the cut with the lowest cost of its dearest stage, then the most even one.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    count = len(costs.layers)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} layers cannot be cut into {num_stages} pipeline stages of at least one layer each")
    sums = (0.0, *accumulate(costs.layers))

    def cost(stage: int, start: int, stop: int) -> float:
        ends = (costs.embedding if stage == 0 else 0.0) + (costs.head if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + ends

    # best[stop]: the best cut of the layers before `stop` into the stages so far
    best: dict[int, Best] = {stop: (cost(0, 0, stop), cost(0, 0, stop) ** 2, (0, stop)) for stop in range(1, count + 1)}
    for stage in range(1, num_stages):
        best = {
            stop: min(
                (max(dearest, cost(stage, start, stop)), squares + cost(stage, start, stop) ** 2, (*bounds, stop))
                for start, (dearest, squares, bounds) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, count + 1)
        }
    bounds = best[count][2]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
