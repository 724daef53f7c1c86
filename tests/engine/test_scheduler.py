"""The scheduler against a cache that checks every read: budget, order, preemption, fairness, aborts at any moment."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.request import Request, Sequence, State
from stoker.engine.core.schedule import Schedule
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.errors import RequestRefused
from stoker.engine.sampling import SamplingParams
from testing.engine.audits import assert_sound

BLOCK = 2


class World:
    """A scheduler with a cache that remembers, in each slot, all tokens up to its own.

    Stale or foreign reads are thus detected.
    """

    def __init__(
        self,
        num_blocks: int = 12,
        budget: int = 6,
        seats: int = 4,
        chunk: int | None = None,
        prefix_cache: bool = True,
        queue: int = 100,
        overlap: bool = False,
        stages: int = 1,
        aging_s: float = math.inf,
        worth_tokens: float = math.inf,
    ) -> None:
        self.overlap, self.stages = overlap, stages
        self.flights: list[Schedule] = []
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_cache)
        self.scheduler = Scheduler(
            self.blocks,
            max_batch_tokens=budget,
            max_requests=seats,
            max_queued_requests=queue,
            chunk_tokens=chunk,
            aging_s=aging_s,
            flight=StepFlight(stages, overlap=overlap),
            worth_tokens=worth_tokens,
        )
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.steps = 0

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        place: int = 0,
        prompt_logprobs: int | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        prompt = tuple(prompt)
        number, now_s = len(self.requests), float(self.steps)
        params = SamplingParams(n=n, prompt_logprobs=prompt_logprobs, cache_salt=cache_salt)
        request = Request(
            ("front", str(number)), prompt, params, max_tokens, frozenset(), number, now_s, priority, place
        )
        self.scheduler.check(len(prompt), max_tokens, n)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule(float(self.steps))
        assert schedule.num_tokens <= self.scheduler.max_batch_tokens
        assert len({chunk.sequence for chunk in schedule.chunks}) == len(schedule.chunks)
        if not self.flights:
            assert bool(schedule.chunks) == self.scheduler.has_unfinished, "somebody advances while anybody waits"
        self._assert_apart(schedule)
        self._compute(schedule)
        if schedule.chunks:
            self.flights.append(schedule)
        keep = self.stages - 1 + self.overlap if schedule.chunks else max(len(self.flights) - 1, 0)
        while len(self.flights) > keep:
            self._take(self.flights.pop(0))
        self.steps += 1
        return schedule

    def _assert_apart(self, schedule: Schedule) -> None:
        """No sequence's token is needed while the step that samples it is in flight, but for the one launched ahead."""
        for chunk in schedule.chunks:
            flying = [flight for flight in self.flights if chunk.sequence in sampled_in(flight)]
            assert len(flying) <= (self.overlap and len(chunk.samples) > 0)

    def _take(self, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            self.scheduler.complete(chunk)
            for sequence in chunk.samples:
                if not sequence.state.finished:
                    self._sample(sequence)

    def _compute(self, schedule: Schedule) -> None:
        read = [(target, i, self.cache.get((source, i))) for source, target in schedule.copies for i in range(BLOCK)]
        self.cache.update({(target, i): value for target, i, value in read if value is not None})
        for chunk in schedule.chunks:
            assert chunk.length <= self.scheduler.chunk_tokens
            for position in range(chunk.start, chunk.start + chunk.length):
                self.cache[self.slot(chunk.sequence, position)] = tuple(self.known(chunk.sequence)[: position + 1])
        for chunk in schedule.chunks:
            for position in range(chunk.start + chunk.length):
                there = self.cache[self.slot(chunk.sequence, position)]
                assert there == tuple(self.known(chunk.sequence)[: position + 1])
                assert len(there) == position + 1

    def known(self, sequence: Sequence) -> list[int]:
        """Return a sequence's tokens, including those that only the device has yet."""
        tokens = list(sequence.tokens)
        for _ in range(sequence.num_pending):
            tokens.append(next_token(tokens, sequence.choice))
        return tokens

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return self.blocks.table(sequence)[position // BLOCK], position % BLOCK

    def _sample(self, sequence: Sequence) -> None:
        if sequence.append(next_token(sequence.tokens, sequence.choice), 0.0) is not None:
            self.scheduler.end(sequence, "length")

    def finish_all(self) -> None:
        """Finish every request, in a bounded number of steps, with the tokens that its prompt alone decides."""
        limit = self.steps + 60 + 20 * sum((len(r.prompt) + r.max_tokens) * r.params.n for r in self.requests)
        while self.scheduler.has_unfinished:
            self.step()
            assert_sound(self.scheduler.audit())
            assert self.steps < limit, "somebody starves"
        for request in self.requests:
            for sequence in request.sequences:
                if sequence.state is not State.ABORTED:
                    assert sequence.tokens == expected(request, sequence.choice)
        assert self.blocks.num_owned == 0


def sampled_in(schedule: Schedule) -> set[Sequence]:
    return {sequence for chunk in schedule.chunks for sequence in chunk.samples}


def next_token(tokens: list[int], choice: int) -> int:
    return (sum(tokens) + len(tokens) * (choice + 1)) % 2


def expected(request: Request, choice: int) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens, choice))
    return tokens


def test_a_prompt_is_computed_in_chunks_and_then_decodes_one_token_a_step() -> None:
    world = World(budget=4)
    world.add([1] * 6, max_tokens=2)
    assert [[(c.start, c.length, len(c.samples)) for c in world.step().chunks] for _ in range(3)] == [
        [(0, 4, 0)],
        [(4, 2, 1)],
        [(6, 1, 1)],
    ]
    assert not world.scheduler.has_unfinished


def test_decoding_comes_before_prompts_and_prompts_fill_the_budget() -> None:
    world = World(budget=4, seats=3)
    world.add([1], max_tokens=5)
    world.step()
    world.add([0] * 10, max_tokens=1)
    assert [(c.start, c.length) for c in world.step().chunks] == [(1, 1), (0, 3)]


def test_the_chunk_limit_leaves_room_for_other_prompts() -> None:
    world = World(budget=6, chunk=2)
    for _ in range(3):
        world.add([1] * 4, max_tokens=1)
    assert [c.length for c in world.step().chunks] == [2, 2, 2]


def test_priority_then_arrival_decides_who_is_admitted() -> None:
    world = World(seats=1)
    late = world.add([1, 1], max_tokens=1, priority=1)
    first = world.add([0, 0], max_tokens=1)
    second = world.add([0, 1], max_tokens=1)
    order = [world.step().chunks[0].sequence.request for _ in range(3)]
    assert order == [first, second, late]


def test_a_higher_priority_takes_the_seat_of_a_lower_one_which_keeps_its_output() -> None:
    world = World(seats=1)
    low = world.add([1, 1], max_tokens=4, priority=5)
    world.step()
    high = world.add([0, 0], max_tokens=1, priority=0)
    world.step()
    assert low.sequences[0].state is State.WAITING
    assert low.sequences[0].num_output == 1
    assert low.sequences[0].preemptions == 1
    world.step()
    assert high.finished
    world.finish_all()


def test_a_step_in_flight_makes_no_blocks_findable_of_a_prompt_that_was_preempted_and_begun_anew() -> None:
    """Over stages: the new run has computed two tokens when the step of the old one ends, with four."""
    world = World(num_blocks=40, budget=4, seats=2, stages=3)
    other = world.add([0], max_tokens=20)
    world.step()
    low = world.add([1] * 12, max_tokens=1, priority=5).sequences[0]
    assert [(chunk.sequence, chunk.length) for chunk in world.step().chunks] == [(low, 4)]
    world.add([0] * 6, max_tokens=1, priority=1)
    world.step()
    assert low.state is State.WAITING
    world.scheduler.end(other.sequences[0], "abort")
    world.step()
    assert (low.state, low.num_computed) == (State.RUNNING, 2)
    assert world.blocks.num_committed(low) * BLOCK <= low.num_computed
    world.scheduler.end(low, "abort")
    world.add([1] * 12, max_tokens=1)
    world.finish_all()


def test_who_cannot_grow_takes_blocks_of_the_youngest_which_is_computed_again() -> None:
    world = World(num_blocks=6, budget=8)
    old = world.add([1, 0, 1], max_tokens=8)
    young = world.add([0, 0, 1], max_tokens=8)
    world.finish_all()
    assert old.sequences[0].preemptions == 0
    assert young.sequences[0].preemptions == 1
    assert world.scheduler.num_preemptions == 1


def test_a_shared_prefix_is_computed_once() -> None:
    world = World(num_blocks=20)
    world.add([1, 0, 1, 0, 1], max_tokens=1)
    world.step()
    second = world.add([1, 0, 1, 0, 0], max_tokens=1)
    assert [(c.start, c.length) for c in world.step().chunks] == [(4, 1)]
    assert second.cached_tokens == 4
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (10, 4)
    assert world.scheduler.queue_s.total == 2  # once for each request


def test_a_prefix_is_shared_within_a_salt_alone() -> None:
    world = World(num_blocks=60, budget=40)
    cached = []
    for salt in (None, "a", "b", "a", None, "b"):
        request = world.add([1, 0, 1, 0, 1], max_tokens=1, cache_salt=salt)
        world.finish_all()
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 0, 4, 4, 4]


COMMON = [1, 0, 0, 1, 1, 1, 0, 0]


def computed(world: World, request: Request) -> list[tuple[int, int]]:
    """Take one step; return what it computes of a request's first choice: (start, length)."""
    return [(c.start, c.length) for c in world.step().chunks if c.sequence is request.sequences[0]]


def test_a_beginning_that_is_being_computed_is_waited_for_and_not_computed_again() -> None:
    world = World(num_blocks=40, budget=40, overlap=True, worth_tokens=8)
    first = world.add([*COMMON, 0], max_tokens=3)
    alike, other = world.add([*COMMON, 1], max_tokens=2), world.add([0] * 5, max_tokens=2)
    assert {c.sequence for c in world.step().chunks} == {first.sequences[0], other.sequences[0]}, "it is passed over"
    assert computed(world, alike) == [], "the step is still under way"
    assert computed(world, alike) == [(8, 1)]
    world.finish_all()


def test_a_beginning_that_comes_in_pieces_is_waited_for_to_its_end() -> None:
    world = World(num_blocks=40, budget=4, overlap=True, worth_tokens=4)
    world.add([*COMMON, 0], max_tokens=1)
    alike = world.add([*COMMON, 1], max_tokens=1)
    assert [computed(world, alike) for _ in range(4)] == [[], [], [], [(8, 1)]]
    world.finish_all()


@pytest.mark.parametrize("prompt", [[*COMMON[:7], 1, 1], [0, *COMMON]], ids=["too few in common", "another beginning"])
def test_what_saves_little_is_not_waited_for(prompt: list[int]) -> None:
    world = World(num_blocks=40, budget=40, overlap=True, worth_tokens=8)
    world.add([*COMMON, 0], max_tokens=3)
    alike = world.add(prompt, max_tokens=2)
    assert computed(world, alike) == [(0, len(prompt))]


def test_a_beginning_with_another_salt_is_not_waited_for() -> None:
    world = World(num_blocks=60, budget=40, overlap=True, worth_tokens=8)
    world.add([*COMMON, 0], max_tokens=3, cache_salt="a")
    same, other = (world.add([*COMMON, 1], max_tokens=2, cache_salt=salt) for salt in ("a", "b"))
    assert computed(world, other) == [(0, 9)]
    assert computed(world, same) == []
    assert computed(world, same) == [(8, 1)]


def test_the_wait_ends_with_the_one_that_computed_the_beginning() -> None:
    world = World(num_blocks=40, budget=4, overlap=True, worth_tokens=4)
    first, alike = world.add([*COMMON, 0], max_tokens=1), world.add([*COMMON, 1], max_tokens=1)
    assert computed(world, alike) == []
    world.scheduler.end(first.sequences[0], "abort")
    assert computed(world, alike) == [(0, 4)]
    world.finish_all()


def test_one_whose_prompt_is_scored_waits_for_no_blocks() -> None:
    world = World(num_blocks=40, budget=40, overlap=True, worth_tokens=4)
    world.add([*COMMON, 0], max_tokens=1)
    scored = world.add([*COMMON, 1], max_tokens=1, prompt_logprobs=0)
    assert computed(world, scored) == [(0, 9)]


def test_choices_fork_when_the_prompt_is_complete_and_copy_only_the_partial_block() -> None:
    world = World(num_blocks=12, seats=3)
    request = world.add([1, 0, 1], max_tokens=3, n=3)
    assert len(world.step().chunks[0].samples) == 3
    assert world.blocks.num_owned == 2
    assert len(world.step().copies) == 2
    assert world.blocks.num_owned == 4
    world.finish_all()
    assert len(request.sequences) == 3


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    world = World(num_blocks=4)
    message = r"6 prompt tokens and 4 output tokens can never fit the cache of 8 tokens \(4 blocks of 2\)"
    with pytest.raises(RequestRefused, match=message) as refused:
        world.add([1] * 6, max_tokens=4)
    assert refused.value.kind == "too_long"
    with pytest.raises(RequestRefused, match="n must be at most 4"):
        world.add([1], max_tokens=1, n=5)


def test_a_full_queue_refuses() -> None:
    world = World(queue=2)
    world.add([1], max_tokens=1)
    world.add([1], max_tokens=1)
    with pytest.raises(RequestRefused, match="2 requests wait, at most 2 may") as refused:
        world.add([1], max_tokens=1)
    assert refused.value.kind == "queue_full"


def test_ending_twice_is_harmless() -> None:
    world = World()
    request = world.add([1], max_tokens=3)
    world.step()
    for _ in range(2):
        world.scheduler.end(request.sequences[0], "abort")
    assert request.sequences[0].state is State.ABORTED
    assert_sound(world.scheduler.audit())


@settings(max_examples=80, deadline=None)
@given(
    num_blocks=st.integers(8, 20),
    budget=st.integers(1, 9),
    seats=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 5),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    stages=st.integers(1, 4),
    aging_s=st.sampled_from([1, 5, math.inf]),
    worth_tokens=st.sampled_from([1, 4, math.inf]),
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=10),
            st.integers(1, 6),
            st.integers(1, 3),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_everybody_ends_with_its_own_tokens_whatever_the_sizes(
    num_blocks: int,
    budget: int,
    seats: int,
    chunk: int | None,
    prefix_cache: bool,
    overlap: bool,
    stages: int,
    aging_s: float,
    worth_tokens: float,
    requests: list[tuple[list[int], int, int, int, int]],
) -> None:
    world = World(
        num_blocks,
        budget,
        seats,
        chunk,
        prefix_cache,
        overlap=overlap,
        stages=stages,
        aging_s=aging_s,
        worth_tokens=worth_tokens,
    )
    for prompt, max_tokens, n, priority, place in requests:
        world.add(prompt, max_tokens, min(n, world.scheduler.num_seats), priority, place)
    world.finish_all()


class AnyOrder(RuleBasedStateMachine):
    """Requests that come, end and are aborted between any steps."""

    overlap = False
    stages = 1

    def __init__(self) -> None:
        super().__init__()
        self.world = World(9, 5, 4, 3, overlap=self.overlap, stages=self.stages, aging_s=6, worth_tokens=BLOCK)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 6),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        place=st.integers(0, 1),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, priority: int, place: int) -> None:
        self.world.add(prompt, max_tokens, n, priority, place)

    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.world.requests))
        sequence = data.draw(st.sampled_from(request.sequences))
        self.world.scheduler.end(sequence, "abort")
        if len(request.sequences) < request.params.n:
            assert request.finished

    @invariant()
    def everything_adds_up(self) -> None:
        assert_sound(self.world.scheduler.audit())

    def teardown(self) -> None:
        self.world.finish_all()


class AnyOrderOverlapped(AnyOrder):
    """The same while a step is under way."""

    overlap = True


class AnyOrderInStages(AnyOrder):
    """The same with steps in three stages, and one launched ahead."""

    overlap = True
    stages = 3


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOverlapped = AnyOrderOverlapped.TestCase
TestAnyOrderOverlapped.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderInStages = AnyOrderInStages.TestCase
TestAnyOrderInStages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_scheduler_and_request_never_import_torch() -> None:
    modules = ", ".join(
        f"stoker.engine.core.{name}" for name in ("blocks", "scheduler", "request", "build_step", "messages")
    )
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
