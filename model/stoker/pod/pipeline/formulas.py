"""Bubble and peak of live activations of the schedules in closed form: what the simulation gives for even stages.

For plans that need no timeline. They hold for m a multiple of p, without time for messages.
"""

from __future__ import annotations

from stoker.pod.pipeline.actions import ScheduleName, Shape
from stoker.pod.pipeline.schedules import check_schedule
from stoker.pod.pipeline.simulation import UNIT, Costs


def bubble(name: ScheduleName, shape: Shape, costs: Costs = UNIT) -> float:
    """Return the share of the ranks' time in which they wait, between 0 and 1.

    GPipe and 1F1B (p - 1) / (m + p - 1), interleaved (p - 1) / (v m + p - 1). Zero-bubble replaces the p - 1 idle
    passes by p - 1 times forward + backward of inputs - backward of weights; that holds for v m >= 2 p - 1, and while
    backward of weights takes no longer than the other two passes.

    Raises:
        ValueError: the schedule does not take so many stages per rank, or a cost is not one number.
    """
    check_schedule(name, shape.stages_per_rank)
    times = costs.forward, costs.backward_input, costs.backward_weight
    if not all(isinstance(time, int | float) for time in times):
        raise ValueError("bubble: the formula needs the same costs for every stage; simulate others")
    forward, for_input, for_weight = times
    work = shape.stages_per_rank * shape.micro_batches * (forward + for_input + for_weight)  # type: ignore[operator]
    hidden = 2 * for_weight if name == "ZeroBubble" else 0.0  # type: ignore[operator]
    idle = (shape.ranks - 1) * max(0.0, forward + for_input + for_weight - hidden)  # type: ignore[operator]
    return float(idle / (work + idle))


def live_activations(name: ScheduleName, shape: Shape, rank: int) -> int:
    """Return the most micro-batch activations of one stage (of the v p) that a rank holds at once.

    Raises:
        ValueError: the schedule does not take so many stages per rank.
    """
    check_schedule(name, shape.stages_per_rank)
    p, v, m = shape.ranks, shape.stages_per_rank, shape.micro_batches
    limits = {
        "GPipe": v * m,
        "OneFOneB": p - rank,
        "Interleaved": p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1,
        "ZeroBubble": v * p,
    }
    return min(limits[name], v * m)
