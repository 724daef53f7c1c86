"""The schedules: pure functions from sizes to each rank's order of forward and backward passes.

GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021), interleaved 1F1B (Megatron-LM, Narayanan et
al. 2021), zero-bubble with the memory of 1F1B (ZB-H1, Qi et al. 2024), here with one or more stages per rank.

p ranks, v stages per rank, m micro-batches. Every stage runs backward in the order of the micro-batches, so sums of
gradients are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from stoker.pod.pipeline.actions import SEVERAL_STAGES, Action, Kind, Orders, ScheduleName, Shape
from stoker.pod.pipeline.messages import with_messages
from stoker.pod.pipeline.weight_filling import fill_with_weights

Compute = list[list[Action]]


def make_schedule(name: ScheduleName, shape: Shape) -> Orders:
    """Return each rank's whole list for one step: passes, sends, receives and reductions.

    Raises:
        ValueError: the schedule is unknown or does not take so many stages per rank.
    """
    return with_messages(compute_order(name, shape), shape)


def compute_order(name: ScheduleName, shape: Shape) -> Orders:
    """Return each rank's passes in order, without communication. Raises ValueError like `make_schedule`."""
    check_schedule(name, shape.stages_per_rank)
    return SCHEDULES[name](shape)


def forward_schedule(shape: Shape) -> Orders:
    """Return each rank's list for forward passes alone (validation)."""
    forwards = [[Action(Kind.FORWARD, stage, mb) for stage, mb in _turns(shape, rank)] for rank in range(shape.ranks)]
    return with_messages(forwards, shape)


def check_schedule(name: str, stages_per_rank: int) -> None:
    """Raise ValueError for an unknown schedule and for stages per rank that it does not take."""
    if name not in SCHEDULES:
        raise ValueError(f"pipelineSchedule {name!r} is unknown; allowed: {', '.join(SCHEDULES)}")
    if stages_per_rank > 1 and name not in SEVERAL_STAGES:
        raise ValueError(
            f"stagesPerRank {stages_per_rank} does not fit pipelineSchedule {name}, which has one stage per rank; "
            f"allowed with it: 1; schedules with more: {', '.join(SEVERAL_STAGES)}"
        )


def gpipe(shape: Shape) -> Compute:
    """All forward passes, then all backward passes. Every rank holds the activations of m micro-batches."""
    return [
        [Action(kind, rank, mb) for kind in (Kind.FORWARD, Kind.BACKWARD) for mb in range(shape.micro_batches)]
        for rank in range(shape.ranks)
    ]


def one_f_one_b(shape: Shape) -> Compute:
    """Forward and backward in turn after a warm-up. Rank r holds the activations of at most p - r micro-batches."""
    return [_one_f_one_b(rank, shape, Kind.BACKWARD) for rank in range(shape.ranks)]


def _one_f_one_b(rank: int, shape: Shape, backward: Kind) -> list[Action]:
    forwards = [Action(Kind.FORWARD, rank, mb) for mb in range(shape.micro_batches)]
    backwards = [Action(backward, rank, mb) for mb in range(shape.micro_batches)]
    return alternate(forwards, backwards, shape.ranks - rank - 1)


def interleaved(shape: Shape) -> Compute:
    """1F1B over v stages per rank, which divides the bubble by v and costs more activations and more messages."""
    if shape.stages_per_rank == 1:
        return one_f_one_b(shape)
    return [_interleaved(rank, shape, Kind.BACKWARD, lead=2) for rank in range(shape.ranks)]


def _interleaved(rank: int, shape: Shape, backward: Kind, lead: int) -> list[Action]:
    """One rank's order. `lead`: forward passes of the warm-up for each rank that follows."""
    p, v, m = shape.ranks, shape.stages_per_rank, shape.micro_batches
    forwards = [Action(Kind.FORWARD, stage, mb) for stage, mb in _turns(shape, rank, padded=True)]
    backwards = [Action(backward, stage, mb) for stage, mb in _turns(shape, rank, padded=True, reverse=True)]
    order = alternate(forwards, backwards, (p - rank - 1) * lead + (v - 1) * p)
    return [action for action in order if action.micro_batch < m]


def _turns(shape: Shape, rank: int, *, padded: bool = False, reverse: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (stage, micro-batch): p micro-batches on the rank's first stage, the same p on its next stage, and so on.

    With `padded` the last group is whole: micro-batches that are not there are left out later. They depend on no
    other micro-batch, so the order stays free of deadlock.
    """
    p, m = shape.ranks, shape.micro_batches
    stages = shape.stages_of(rank)
    for first in range(0, m, p):
        for stage in reversed(stages) if reverse else stages:
            yield from ((stage, mb) for mb in range(first, first + p if padded else min(first + p, m)))


def zero_bubble(shape: Shape) -> Compute:
    """1F1B (interleaved with v > 1) whose backward passes are split: products for weights fill the waiting times.

    Rank r holds at most the activations that rank 0 holds, v p micro-batches of one stage.
    """
    kind, p = Kind.BACKWARD_INPUT, shape.ranks
    if shape.stages_per_rank == 1:
        fixed = [_one_f_one_b(rank, shape, kind) for rank in range(p)]
    else:
        fixed = [_interleaved(rank, shape, kind, lead=1) for rank in range(p)]
    return fill_with_weights(fixed, shape, live_limit=shape.stages)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return `warmup` forward passes, then one forward and one backward in turn, then the other backward passes."""
    ahead, paired = forwards[:warmup], forwards[warmup:]
    pairs = chain.from_iterable(zip(paired, backwards, strict=False))
    return [*ahead, *pairs, *backwards[len(paired) :]]


SCHEDULES: Mapping[str, Callable[[Shape], Compute]] = {
    "GPipe": gpipe,
    "OneFOneB": one_f_one_b,
    "Interleaved": interleaved,
    "ZeroBubble": zero_bubble,
}
