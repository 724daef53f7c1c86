"""Sends, receives and reductions of a schedule, inserted into its order of passes.

A message is sent as soon as it is made. Its receive is posted one pass before the pass that needs it, in the order in
which the peer sends, because each pair of ranks has one channel for each direction. Stages of one rank hand their
tensors over without a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stoker.pod.pipeline.actions import INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Orders, Shape


def with_messages(orders: Orders, shape: Shape) -> Orders:
    """Return the lists with communication. `orders` holds passes alone."""
    return [list(_with_reductions(_with_receives(list(_with_sends(order, shape)), shape))) for order in orders]


def source(action: Action, shape: Shape) -> Action | None:
    """Return the receive that a pass needs, or None: its input lies on the same rank, or it needs none."""
    stage = action.stage
    if action.kind is Kind.FORWARD and stage > 0 and not _is_local(stage - 1, stage, shape):
        return Action(Kind.RECEIVE_ACTIVATION, stage, action.micro_batch)
    if action.kind in INPUT_GRADIENT and stage < shape.stages - 1 and not _is_local(stage, stage + 1, shape):
        return Action(Kind.RECEIVE_GRADIENT, stage, action.micro_batch)
    return None


def _is_local(stage: int, other: int, shape: Shape) -> bool:
    return shape.rank_of(stage) == shape.rank_of(other)


def _with_sends(order: Sequence[Action], shape: Shape) -> Iterator[Action]:
    for action in order:
        yield action
        stage = action.stage
        if action.kind is Kind.FORWARD and stage < shape.stages - 1 and not _is_local(stage, stage + 1, shape):
            yield Action(Kind.SEND_ACTIVATION, stage, action.micro_batch)
        if action.kind in INPUT_GRADIENT and stage > 0 and not _is_local(stage - 1, stage, shape):
            yield Action(Kind.SEND_GRADIENT, stage, action.micro_batch)


def _with_receives(order: Sequence[Action], shape: Shape) -> list[Action]:
    """Post each receive before the pass that precedes its use: the message then travels beside that pass."""
    posted: dict[int, list[Action]] = defaultdict(list)
    previous_pass = 0
    for place, action in enumerate(order):
        if (receive := source(action, shape)) is not None:
            posted[previous_pass].append(receive)
        if action.kind not in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            previous_pass = place
    return [item for place, action in enumerate(order) for item in (*posted[place], action)]


def _with_reductions(order: Sequence[Action]) -> Iterator[Action]:
    """Reduce a stage after its last backward pass, and after the message that another rank waits for."""
    last = {action.stage: place for place, action in enumerate(order) if action.kind in WEIGHT_GRADIENT}
    due = {place + _is_send(order, place + 1): order[place] for place in last.values()}
    for place, action in enumerate(order):
        yield action
        if place in due:
            yield Action(Kind.REDUCE, *due[place][1:])


def _is_send(order: Sequence[Action], place: int) -> bool:
    return place < len(order) and order[place].kind is Kind.SEND_GRADIENT
