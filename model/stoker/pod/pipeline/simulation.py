"""Simulation of a schedule with given costs: it finds deadlocks, wrong orders, time, bubble and live activations.

Receives and sends block no rank. A message has arrived when it was sent and its receive was posted, `transfer` later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.pod.pipeline.actions import (
    COMPUTE,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Orders,
    Shape,
)


class ScheduleError(ValueError):
    """A schedule that cannot be executed: a deadlock, a missing or repeated action, or messages in another order."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of each pass of one micro-batch, in any unit. A sequence has one number per stage."""

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    transfer: float = 0.0
    """Of one message."""

    def of(self, action: Action) -> float:
        """Time of one pass; a whole backward pass is both of its halves; other actions take none."""
        forward, for_input, for_weight = (
            cost if isinstance(cost, int | float) else cost[action.stage]
            for cost in (self.forward, self.backward_input, self.backward_weight)
        )
        times = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: for_input + for_weight,
            Kind.BACKWARD_INPUT: for_input,
            Kind.BACKWARD_WEIGHT: for_weight,
        }
        return times.get(action.kind, 0.0)


UNIT = Costs()
"""Forward, backward of inputs and backward of weights take the same time, as for plain matrix products."""


@dataclass(frozen=True)
class Span:
    """One action of a rank and its time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulated step does, and when."""

    spans: tuple[Span, ...]
    """Passes and messages, rank by rank in order."""
    makespan: float
    """End of the last action."""
    busy: tuple[float, ...]
    """By rank: time in passes."""
    peak_live: tuple[int, ...]
    """By rank: most micro-batch activations held at once, in stages."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(orders: Orders, shape: Shape, costs: Costs = UNIT) -> Timeline:
    """Run a schedule (with messages) on a clock.

    Raises:
        ScheduleError: an action is missing or twice, messages are received in another order than they are sent, or
            the ranks wait for each other; the message names the actions.
    """
    check_complete(orders, shape)
    check_channels(orders, shape)
    return _timeline(orders, _run(orders, shape, costs))


def needs(action: Action, shape: Shape) -> tuple[Action, ...]:
    """Return the passes that must have ended before a pass begins, wherever they run."""
    stage, mb = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, mb),) if stage else ()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, mb),)
    if action.kind in INPUT_GRADIENT:
        later = (Action(action.kind, stage + 1, mb),) if stage < shape.stages - 1 else ()
        return (Action(Kind.FORWARD, stage, mb), *later)
    return ()


def check_complete(orders: Orders, shape: Shape) -> None:
    """Raise ScheduleError unless each pass is there once, on the rank of its stage, with its communication."""
    for rank, order in enumerate(orders):
        counts = Counter(order)
        if repeated := [action for action, count in counts.items() if count > 1]:
            raise ScheduleError(f"rank {rank}: {repeated[0]} is there {counts[repeated[0]]} times")
        if foreign := [action for action in order if shape.rank_of(action.stage) != rank]:
            raise ScheduleError(f"rank {rank}: {foreign[0]} belongs to rank {shape.rank_of(foreign[0].stage)}")
    found = {action for order in orders for action in order}
    split = any(action.kind is Kind.BACKWARD_INPUT for action in found)
    trains = split or any(action.kind is Kind.BACKWARD for action in found)
    wanted = _wanted(shape, trains=trains, split=split)
    for what, actions in (("is missing", wanted - found), ("does not belong to the schedule", found - wanted)):
        if actions:
            raise ScheduleError(f"{min(actions)} {what}")


def _wanted(shape: Shape, *, trains: bool, split: bool) -> set[Action]:
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,)
    kinds = (Kind.FORWARD, *(backward if trains else ()))
    pairs = [(stage, mb) for stage in range(shape.stages) for mb in range(shape.micro_batches)]
    wanted = {Action(kind, stage, mb) for kind in kinds for stage, mb in pairs}
    messages = shape.ranks > 1
    for stage, mb in pairs if messages else ():
        if stage < shape.stages - 1:
            wanted |= {Action(Kind.SEND_ACTIVATION, stage, mb), Action(Kind.RECEIVE_ACTIVATION, stage + 1, mb)}
        if stage and trains:
            wanted |= {Action(Kind.SEND_GRADIENT, stage, mb), Action(Kind.RECEIVE_GRADIENT, stage - 1, mb)}
    last = shape.micro_batches - 1
    return wanted | ({Action(Kind.REDUCE, stage, last) for stage in range(shape.stages)} if trains else set())


def check_channels(orders: Orders, shape: Shape) -> None:
    """Raise ScheduleError unless each channel's receives are posted in the order of its sends."""
    for sends, receives, step in (
        (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, 1),
        (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, -1),
    ):
        for rank, order in enumerate(orders):
            peer = (rank + step) % shape.ranks
            sent = [(action.stage + step, action.micro_batch) for action in order if action.kind is sends]
            got = [(action.stage, action.micro_batch) for action in orders[peer] if action.kind is receives]
            if sent != got:
                at = next(i for i, pair in enumerate(zip(sent, got, strict=False)) if pair[0] != pair[1])
                raise ScheduleError(
                    f"rank {rank} sends (stage, micro-batch) {sent[at]} where rank {peer} receives {got[at]}"
                )


def _run(orders: Orders, shape: Shape, costs: Costs) -> dict[Action, Span]:
    done: dict[Action, Span] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                start = _start(order[places[rank]], shape, costs, done)
                if start is None:
                    break
                action = order[places[rank]]
                start = max(start, clocks[rank])
                clocks[rank] = start + costs.of(action)
                done[action] = Span(rank, action, start, clocks[rank])
                places[rank] += 1
                moved = True
    waiting = [f"rank {rank} at {order[place]}" for rank, (order, place) in _unfinished(orders, places)]
    if waiting:
        raise ScheduleError(f"deadlock: {'; '.join(waiting)}")
    return done


def _unfinished(orders: Orders, places: Sequence[int]) -> list[tuple[int, tuple[Sequence[Action], int]]]:
    pairs = enumerate(zip(orders, places, strict=True))
    return [(rank, (order, place)) for rank, (order, place) in pairs if place < len(order)]


def _start(action: Action, shape: Shape, costs: Costs, done: dict[Action, Span]) -> float | None:
    """Earliest start by what the action depends on; None while that is not known."""
    latest = 0.0
    for needed in needs(action, shape):
        is_remote = shape.rank_of(needed.stage) != shape.rank_of(action.stage)
        carriers = message(action, needed) if is_remote else (needed,)
        if any(carrier not in done for carrier in carriers):
            return None
        latest = max(latest, *(done[carrier].end for carrier in carriers)) + (costs.transfer if is_remote else 0.0)
    return latest


def message(action: Action, needed: Action) -> tuple[Action, Action]:
    """Return the send and the receive that carry the result of a remote pass to a pass."""
    if action.kind is Kind.FORWARD:
        return Action(Kind.SEND_ACTIVATION, *needed[1:]), Action(Kind.RECEIVE_ACTIVATION, *action[1:])
    return Action(Kind.SEND_GRADIENT, *needed[1:]), Action(Kind.RECEIVE_GRADIENT, *action[1:])


def _timeline(orders: Orders, done: dict[Action, Span]) -> Timeline:
    spans = tuple(done[action] for order in orders for action in order)
    busy = tuple(sum(done[action].end - done[action].start for action in order) for order in orders)
    return Timeline(spans, max(span.end for span in spans), busy, tuple(peak_live(order) for order in orders))


def peak_live(order: Sequence[Action]) -> int:
    """Most activations that a rank holds at once: those of a FORWARD stay until the weights' gradients are added."""
    live = peak = 0
    for action in order:
        if action.kind in COMPUTE:
            live += (action.kind is Kind.FORWARD) - (action.kind in WEIGHT_GRADIENT)
            peak = max(peak, live)
    return peak
