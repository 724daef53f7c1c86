"""Steps that fail at any moment, aborts and preemption together: every innocent request gets its own tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import Delta
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.sampling import SamplingParams
from testing.engine.audits import assert_sound
from tests.engine.test_overlap import Late

BLOCK, VOCABULARY, POISON = 2, 50, 13


def next_token(tokens: list[int], seed: int, choice: int) -> int:
    """Return the next token, which is never the poison."""
    return 20 + (sum(tokens) * 7 + len(tokens) + seed * (choice + 1)) % 30


class Machine:
    """A runner without a model, whose slots hold all tokens up to their own.

    A foreign or stale slot is thus detected.
    """

    def __init__(self, faults: Iterator[str]) -> None:
        self.faults = faults
        self.rows: dict[int, list[int]] = {}
        self.keys: dict[int, tuple[int, int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: StepInput) -> StepOutput:
        self._set_up(step)
        fault = next(self.faults)
        if fault == "before":
            raise RuntimeError("failed before it had computed anything")
        for place, (seat, start, length) in enumerate(zip(step.seats, step.starts, step.lengths, strict=True)):
            if fault == "middle" and place:
                raise RuntimeError("failed in the middle")
            for position in range(start, start + length):
                self.cache[self._slot(seat, position)] = tuple(self.rows[seat][: position + 1])
        if any(POISON in self.rows[seat] for seat in step.seats):
            raise RuntimeError("poison")
        output = self._sample(step)
        if fault == "after":
            raise RuntimeError("failed when all was done")
        return output

    def _set_up(self, step: StepInput) -> None:
        for opening in step.openings:
            self.rows[opening.seat] = [*opening.tokens]
            self.keys[opening.seat] = (opening.params.seed or 0, opening.choice)
        for seat, column, block in step.table:
            self.tables.setdefault(seat, {})[column] = block
        for block in step.cleared:
            self._write(block, [None, None])
        copied = [(target, [self.cache.get((source, i)) for i in range(BLOCK)]) for source, target in step.copies]
        for target, content in copied:
            self._write(target, content)

    def _write(self, block: int, content: list[Any]) -> None:
        for offset, there in enumerate(content):
            self.cache.pop((block, offset), None)
            if there is not None:
                self.cache[block, offset] = there

    def _slot(self, seat: int, position: int) -> tuple[int, int]:
        return self.tables[seat][position // BLOCK], position % BLOCK

    def _sample(self, step: StepInput) -> StepOutput:
        tokens, valid = [], []
        for chunk, seat in zip(step.sample_chunks, step.sample_seats, strict=True):
            end = step.starts[chunk] + step.lengths[chunk]
            seen = self.rows[step.seats[chunk]][:end]
            valid.append(
                all(self.cache.get(self._slot(step.seats[chunk], p)) == tuple(seen[: p + 1]) for p in range(end))
            )
            tokens.append(next_token(seen, *self.keys[seat]))
            self.rows[seat][end:] = [tokens[-1]]
        nothing = ((),) * len(step.seats)
        return StepOutput(step.number, tuple(tokens), tuple(valid), (None,) * len(tokens), nothing)


def expected(prompt: list[int], params: SamplingParams, choice: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(params.max_tokens or 0):
        tokens.append(next_token(tokens, params.seed or 0, choice))
    return tokens[len(prompt) :]


REQUESTS = st.tuples(
    st.integers(1, 12),  # tokens of the prompt
    st.integers(1, 3),  # choices
    st.integers(1, 6),  # output tokens
    st.integers(0, 2),  # priority
    st.booleans(),  # poison in the prompt
    st.integers(0, 6),  # steps after which it comes
    st.none() | st.integers(0, 9),  # steps after which it is aborted
)


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    faults=st.lists(st.sampled_from(["", "", "", "before", "middle", "after"]), max_size=30),
    late=st.booleans(),
    stages=st.sampled_from([1, 1, 2, 3]),
    overlap=st.booleans(),
    num_blocks=st.integers(9, 24),
    budget=st.integers(3, 12),
    chunk=st.none() | st.integers(1, 5),
    prefix_cache=st.booleans(),
    worth_tokens=st.sampled_from([BLOCK, math.inf]),
)
@example(  # a step in flight has a chunk of a sequence that a later one preempted
    requests=[*((1, 1, 1, 0, False, comes, None) for comes in (2, 2, 4)), (2, 1, 1, 1, False, 2, None)],
    faults=["before"], late=False, stages=3, overlap=False, num_blocks=9, budget=3, chunk=None, prefix_cache=False,
    worth_tokens=BLOCK,
)  # fmt: skip
@example(  # it copies a block that a later one gives to another sequence
    requests=[(1, 1, 1, 1, False, 1, None), (11, 2, 2, 1, False, 0, None), (9, 1, 1, 0, True, 2, None),
              *((1, 1, 1, 0, False, 0, None) for _ in range(2)), (7, 1, 1, 0, False, 1, None)],
    faults=[], late=False, stages=2, overlap=True, num_blocks=18, budget=5, chunk=None, prefix_cache=True,
    worth_tokens=BLOCK,
)  # fmt: skip
@example(  # and clears the copy's target, which was a failed request's
    requests=[(1, 1, 1, 0, False, 0, None), (1, 1, 1, 2, False, 0, None), (1, 3, 1, 0, False, 6, None),
              (4, 1, 1, 0, True, 2, None), (5, 2, 2, 1, False, 1, None)],
    faults=[], late=False, stages=3, overlap=False, num_blocks=9, budget=4, chunk=None, prefix_cache=False,
    worth_tokens=BLOCK,
)  # fmt: skip
def test_whatever_fails_everybody_else_gets_its_own_tokens(
    requests: list[Any], faults: list[str], late: bool, stages: int, overlap: bool, num_blocks: int, budget: int,
    chunk: int | None, prefix_cache: bool, worth_tokens: float,
) -> None:  # fmt: skip
    def endless() -> Iterator[str]:
        yield from faults
        while True:
            yield ""

    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK, prefix_cache),
        max_batch_tokens=budget,
        max_requests=4,
        max_queued_requests=99,
        chunk_tokens=chunk,
        worth_tokens=worth_tokens,
        flight=StepFlight(stages, overlap=overlap),
    )
    machine = Machine(endless())
    executor = Late(machine, stages) if late else InProcess(machine)
    engine = LLMEngine(executor, scheduler, ModelLimits(VOCABULARY, 18, ()), overlap=overlap)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    deltas: list[Delta] = []
    step = 0
    while step < 10 or engine.has_unfinished:
        for number, (length, n, max_tokens, priority, poisoned, comes, goes) in enumerate(requests):
            name = str(number)
            if comes == step:
                prompt = [1 + (number * place) % 2 for place in range(length)]
                prompt[-1] = POISON if poisoned else prompt[-1]
                params = SamplingParams(n=min(n, scheduler.num_seats), max_tokens=max_tokens, seed=number)
                asked[name] = prompt, params
                engine.add_request(name, prompt, params, priority=priority)
            if goes is not None and comes + goes == step:
                deltas += [delta for _, delta in engine.abort_request(name)]
        deltas += [delta for _, delta in engine.step()]
        assert_sound(engine.scheduler.audit())
        step += 1
        assert step < 600, "somebody starves"
    assert engine.requests == {}
    assert engine.stats().owned_blocks == 0
    for name, (prompt, params) in asked.items():
        for choice in range(params.n):
            mine = [delta for delta in deltas if (delta.request_id, delta.choice) == (name, choice)]
            (reason,) = [delta.finish_reason for delta in mine if delta.finish_reason]
            tokens = [token for delta in mine for token in delta.tokens]
            wanted = expected(prompt, params, choice)
            assert tokens == (wanted if reason == "length" else wanted[: len(tokens)]), (name, choice, reason)
            if reason == "error":
                assert POISON in prompt or faults_alone(mine), mine


def faults_alone(deltas: list[Delta]) -> bool:
    """Return whether the request failed: it was alone in a failed step, so that the fault cannot be attributed."""
    return "failed" in (deltas[-1].error or "")
