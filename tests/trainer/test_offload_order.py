"""State in host memory with streams that run in any order that their events allow: the bits of one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE, Bucket
from stoker.trainer.rank.communicator import Pending
from stoker.trainer.rank.offload import OffloadedUpdate
from stoker.trainer.rank.optimizer import Adam, HeldState, HostCopy, UpdateNumbers
from testing.trainer.any_order import AnyOrder, Event, QueuedAdam, Stream

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Buckets of `ranks` shards each, of which the rank `rank` holds one, by number of lines."""

    ranks: int
    rank: int
    lines: tuple[int, ...]
    piece: int
    wide: bool


STEPS = 3


def starting_states(case: Case) -> list[HeldState]:
    random, found = torch.Generator().manual_seed(3), []
    for lines in case.lines:
        named = [("a", torch.nn.Parameter(torch.empty(lines, LINE)))]
        master, first, second = (torch.randn(lines * LINE, generator=random) for _ in range(3))
        rounded = None if case.wide else torch.zeros(lines * LINE, dtype=torch.bfloat16)
        found.append(
            HeldState(
                bucket=Bucket("b", named, 1),
                start=0,
                master=master,
                gradient=torch.empty(0),
                exp_avg=first,
                exp_avg_sq=second.square(),
                parameters=rounded,
                copied=HostCopy(),
            )
        )
    return found


def gradient_of(case: Case, step: int, bucket: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + bucket)
    return torch.randn(case.ranks, case.lines[bucket] * LINE, generator=random)


def numbers_of(step: int) -> UpdateNumbers:
    return UpdateNumbers(step=step + 1, learning_rate=0.1, scale=torch.tensor(0.5))


def used_by(state: HeldState) -> Tensor:
    """What a forward pass reads."""
    return state.master if state.parameters is None else state.parameters


def one_after_another(case: Case) -> list[Tensor]:
    """Weights as each forward pass sees them, and the state at the end."""
    adam, seen = Adam(OptimizationConfig(), Ops("reference")), []
    states = [
        replace(state, gradient=torch.empty(lines * LINE))
        for state, lines in zip(starting_states(case), case.lines, strict=True)
    ]
    for step in range(STEPS):
        for number, state in enumerate(states):
            state.gradient.copy_(gradient_of(case, step, number).sum(0))
            adam.update_state(state, numbers_of(step))
            seen.append(used_by(state).clone())
    return seen + [value for state in states for value in (state.master, state.exp_avg, state.exp_avg_sq)]


def in_streams(case: Case, queues: AnyOrder) -> list[Tensor]:
    """The same with state in host memory, as `Zero` drives it: backward from the last bucket to the first."""
    streamed = OffloadedUpdate(QueuedAdam(OptimizationConfig(), queues), CPU, case.piece * LINE, queues)
    sums = [torch.zeros(case.ranks, lines * LINE) for lines in case.lines]
    states = [replace(state, gradient=sums[number][case.rank]) for number, state in enumerate(starting_states(case))]
    seen: list[Tensor] = []

    def backward(step: int, number: int) -> HeldState:
        state, held = states[number], sums[number]
        assert state.copied is not None
        queues.wait(state.copied.event)  # as `BucketState._take_back`
        queues.run(lambda: held.copy_(gradient_of(case, step, number)))
        made = queues.mark()
        with queues.inside(queues.reducing):
            queues.wait(made)
            queues.run(lambda: held[case.rank].copy_(held.sum(0)))
            reduced = queues.mark()
        spare = held.view(-1)[: case.rank * held.shape[1]], held.view(-1)[(case.rank + 1) * held.shape[1] :]
        return replace(state, early=streamed.read_ahead(state, spare, Pending(lambda: queues.wait(reduced))))

    for step in range(STEPS):
        held = [backward(step, number) for number in reversed(range(len(states)))][::-1]
        with queues.inside(queues.reducing):
            all_reduced = queues.mark()
        queues.wait(all_reduced)
        updated: list[Event] = []
        streamed.update(held, numbers_of(step), lambda _bucket, step=updated: step.append(queues.mark()))  # type: ignore[misc]
        for event, state in zip(updated, states, strict=True):  # the next forward pass
            queues.wait(event)
            place = torch.empty_like(used_by(state))
            queues.copy(place, used_by(state))
            seen.append(place)
    queues.drain()
    return seen + [value for state in states for value in (state.master, state.exp_avg, state.exp_avg_sq)]


def check(case: Case, pick: Callable[[list[Stream]], Stream]) -> None:
    for got, expected in zip(in_streams(case, AnyOrder(pick)), one_after_another(case), strict=True):
        assert torch.equal(got, expected)


cases = st.integers(1, 4).flatmap(
    lambda ranks: st.builds(
        Case,
        ranks=st.just(ranks),
        rank=st.integers(0, ranks - 1),
        lines=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
        piece=st.integers(1, 3),
        wide=st.booleans(),
    )
)


@settings(max_examples=60, deadline=None)
@given(case=cases, seed=st.integers(0, 1 << 30))
def test_every_order_that_the_events_allow_gives_the_same_bits(case: Case, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    check(case, lambda ready: ready[int(torch.randint(len(ready), (1,), generator=random))])


@pytest.mark.parametrize("first", ["arriving", "updates", "leaving", "main", "reducing"])
def test_a_stream_that_is_always_first_or_last_changes_no_bit(first: str) -> None:
    for turn in (0, -1):
        queues = AnyOrder(lambda ready: ready[0])
        favourite = getattr(queues, first)
        queues._pick = lambda ready: sorted(ready, key=lambda stream: stream is not favourite)[turn]  # noqa: B023
        case = Case(3, 1, (5, 7, 2), 2, wide=False)
        for got, expected in zip(in_streams(case, queues), one_after_another(case), strict=True):
            assert torch.equal(got, expected)


def test_reads_begin_in_backward_and_both_directions_run_at_once() -> None:
    """Of two ranks a third of a bucket arrives before its update may begin; no piece waits for one that leaves."""
    queues = AnyOrder(lambda ready: ready[0])
    streamed = OffloadedUpdate(QueuedAdam(OptimizationConfig(), queues), CPU, LINE, queues)
    state = replace(starting_states(Case(2, 0, (9,), 1, wide=False))[0], gradient=torch.zeros(9 * LINE))
    streamed.update([state], numbers_of(0), lambda _bucket: None)
    queues.drain()  # the first update makes the windows, in its own stream
    spare = torch.zeros(0), torch.full((9 * LINE,), torch.nan)
    places = [tensor.fill_(torch.nan) for window in streamed._windows for tensor in window.tensors]
    early = streamed.read_ahead(state, spare, Pending(lambda: None))
    assert [piece.tensors[0].numel() for piece in early] == [LINE] * 3
    queues.wait(backward := Event())
    streamed.update([replace(state, early=early)], numbers_of(1), lambda _bucket: None)
    queues.run_without(queues.leaving)
    assert not spare[1].isnan().any(), "early pieces arrive before backward has ended"
    assert not any(place.isnan().any() for place in places), "and so do the next ones"
    assert [stream for stream in queues.streams if stream.waiting] == [*queues.streams[:1], *queues.streams[2:]]
    backward.happen()
    queues.drain()
