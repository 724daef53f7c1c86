"""Classes inside the engine: order of service, victims, ageing, against a slow twin; what travels from the router."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.core.core_group import merged_stats
from stoker.engine.core.request import AGED, Request, State
from stoker.engine.core.schedule import Schedule
from stoker.engine.core.stats import ClassStats
from stoker.pod.class_place import MAX_CLASSES, PLACE_HEADER, place_in
from testing.engine.serving import run, serving, until
from testing.engine.slow_order import SlowOrder, sequences
from testing.engine.stats import STATS
from tests.engine.test_scheduler import World

HEADER = PLACE_HEADER.decode()


class Watched(World):
    """A world in which each step is compared with the slow twin."""

    def __init__(self, aging_s: float, *, num_blocks: int = 12, budget: int = 6, seats: int = 4) -> None:
        super().__init__(num_blocks, budget, seats, aging_s=aging_s)
        self.twin = SlowOrder(aging_s)
        self.first_step: dict[Request, int] = {}
        self.last_step: dict[Request, int] = {}

    def step(self) -> Schedule:
        self.twin.turn(self.requests, float(self.steps))
        waited = sequences(self.requests, State.WAITING)
        schedule = super().step()
        self._compare(schedule, [one for one in schedule.opened if one in waited], {*waited, *schedule.preempted})
        for chunk in schedule.chunks:
            self.first_step.setdefault(chunk.sequence.request, self.steps)
        for request in self.requests:
            if request.finished:
                self.last_step.setdefault(request, self.steps)
        return schedule

    def _compare(self, schedule: Schedule, admitted: list[object], waited: set[object]) -> None:
        rank = self.twin.rank
        assert admitted == sorted(waited, key=rank)[: len(admitted)], "admitted in the order of service"  # type: ignore[arg-type]
        scheduler = self.scheduler
        assert scheduler.waiting == sorted(sequences(self.requests, State.WAITING), key=rank)
        assert scheduler.running == sorted(sequences(self.requests, State.RUNNING), key=rank)
        for victim in schedule.preempted:
            kept = [one for one in scheduler.running if not one.state.finished]
            assert all(rank(one) < rank(victim) for one in kept), "the last in rank goes first"
        aged = {one.request for one in (*scheduler.running, *scheduler.waiting) if one.request.standing == AGED}
        assert len(aged) <= 1
        assert scheduler.ageing.num_aged == len(self.twin.aged)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it comes
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.integers(1, 6),  # output tokens
        st.integers(1, 2),  # choices
        st.integers(-1, 1),  # priority
        st.integers(0, 2),  # class
    ),
    min_size=2,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    aging_s=st.sampled_from([1, 4, 15, math.inf]),
    num_blocks=st.integers(8, 16),
    seats=st.integers(2, 4),
)
def test_each_step_serves_whom_the_slow_twin_names(
    requests: list[tuple[int, list[int], int, int, int, int]], aging_s: float, num_blocks: int, seats: int
) -> None:
    world = Watched(aging_s, num_blocks=num_blocks, seats=seats)
    for pause, prompt, max_tokens, n, priority, place in requests:
        for _ in range(pause):
            if world.scheduler.has_unfinished:
                world.step()
        world.add(prompt, max_tokens, n, priority, place)
    world.finish_all()


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, aging_s=st.sampled_from([1, 4]))
def test_one_class_and_priority_are_served_as_they_came_whatever_their_age(
    requests: list[tuple[int, list[int], int, int, int, int]], aging_s: float
) -> None:
    """Ageing changes no step of them."""
    aged, plain = World(aging_s=aging_s), World()
    for pause, prompt, max_tokens, n, _, _ in requests:
        for world in (aged, plain):
            world.add(prompt, max_tokens, n)
        for _ in range(pause):
            assert shape(aged.step()) == shape(plain.step())
    while plain.scheduler.has_unfinished:
        assert shape(aged.step()) == shape(plain.step())
    assert not aged.scheduler.has_unfinished
    assert aged.scheduler.ageing.num_aged == 0


def shape(schedule: Schedule) -> list[tuple[str, int, int, int]]:
    return [(one.sequence.request.key[1], one.sequence.choice, one.start, one.length) for one in schedule.chunks]


LONGEST = 8
"""Tokens of the requests below, prompt and output."""
FLOOD = 3
"""Requests of the first class that always wait."""


def flood(world: World) -> None:
    """Keep requests of the first class waiting."""
    while sum(one.request.place == 0 for one in world.scheduler.waiting) < FLOOD:
        world.add([1, 0, 1, len(world.requests) % 2], LONGEST - 4)


@settings(max_examples=25, deadline=None)
@given(
    aging_s=st.integers(1, 30),
    seats=st.integers(1, 3),
    num_blocks=st.integers(8, 14),
    arrivals=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 2)), min_size=1, max_size=5),
)
def test_no_class_starves_below_an_endless_flood(
    aging_s: int, seats: int, num_blocks: int, arrivals: list[tuple[int, int]]
) -> None:
    """The bound of `ageing`: what ran when its turn came takes at most `seats` x LONGEST steps, it itself LONGEST."""
    turn = (seats + 1) * LONGEST
    world = Watched(aging_s, seats=seats, num_blocks=num_blocks)
    flood(world)
    low: list[Request] = []
    for pause, place in arrivals:
        for _ in range(pause + 1):
            world.step()
            flood(world)
        low.append(world.add([0, 1, 1, 0], LONGEST - 4, place=place))
    limit = world.steps + aging_s + (len(low) + FLOOD) * turn + 1
    while not all(one.finished for one in low):
        assert world.steps < limit, "one starves"
        world.step()
        flood(world)
    for older, request in enumerate(low):
        bound = request.arrival_s + aging_s + (FLOOD + older + 1) * turn + 1
        assert world.last_step[request] <= bound


def test_without_ageing_the_flood_starves_a_lower_class() -> None:
    world = Watched(math.inf, seats=2)
    flood(world)
    low = world.add([0, 1], 2, place=1)
    for _ in range(300):
        world.step()
        flood(world)
    assert low not in world.first_step


def test_a_class_goes_before_every_priority_of_later_classes() -> None:
    world = World(seats=1)
    batch = world.add([1, 1], max_tokens=1, priority=-1000, place=1)
    later = world.add([0, 0], max_tokens=1, priority=5)
    first = world.add([0, 1], max_tokens=1, priority=4)
    assert [world.step().chunks[0].sequence.request for _ in range(3)] == [first, later, batch]


def test_the_victim_is_of_the_lowest_class_and_not_the_youngest() -> None:
    world = World(num_blocks=6, budget=8)
    batch = world.add([1, 0, 1], max_tokens=8, place=1)
    world.step()
    world.add([0, 0, 1], max_tokens=8)
    world.finish_all()
    assert [request.sequences[0].preemptions for request in world.requests] == [1, 0]
    (first, second) = world.scheduler.classes.stats((), ())
    assert batch.place == second.place == 1
    assert (first.preemptions, second.preemptions) == (0, 1)


def test_an_aged_request_goes_first_and_is_not_preempted_for_earlier_classes() -> None:
    world = World(seats=1, aging_s=3)
    world.add([1], max_tokens=4)
    batch = world.add([0], max_tokens=3, place=1)
    for _ in range(4):
        world.step()
        world.add([1], max_tokens=1)
    assert [world.step().chunks[0].sequence.request for _ in range(3)] == [batch] * 3
    assert batch.finished
    assert batch.sequences[0].preemptions == 0
    world.finish_all()
    counts = world.scheduler.classes.stats(world.scheduler.waiting, world.scheduler.running)
    assert [(one.place, one.aged, sum(one.queue_s.values())) for one in counts] == [(0, 0, 5), (1, 1, 1)]
    assert counts[1].queue_sum_s == 4.0


@pytest.mark.parametrize("value", [b"8", b"-1", b"x", b"00", "\u00b2".encode("latin-1")])
def test_a_place_that_no_class_can_have_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=f"header {HEADER}: a class's number from 0 to {MAX_CLASSES - 1} is allowed"):
        place_in(value)
    assert place_in(b"") == 0
    assert place_in(b"7") == 7


def test_the_front_passes_class_and_priority_on_and_shows_the_classes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "say:a", "priority": -5}
            assert (await s.http.post("/v1/completions", json=body, headers={HEADER: "2"})).status_code == 200
            assert (await s.http.post("/v1/completions", json=body)).status_code == 200
            assert [(one.place, one.priority) for one in s.core.requests] == [(2, -5), (0, -5)]
            refused = await s.http.post("/v1/completions", json=body, headers={HEADER: "9"})
            assert refused.status_code == 400
            assert f"header {HEADER}: a class's number from 0 to 7 is allowed, got '9'" in refused.text
            wrong = await s.http.post("/v1/completions", json={"prompt": "a", "priority": 2**31})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "priority")
            queues = (ClassStats(0, 1, 2, 0, 0, 0.5, {}), ClassStats(1, 3, 0, 4, 5, 80.0, {-8: 2, 44: 1}))
            await s.core.send(replace(STATS, step_tokens=(0,) * 14, classes=queues))
            await until(lambda: s.front.core.stats is not None and s.front.core.stats.classes == queues)
            text = (await s.http.get("/metrics")).text
            of_batch = 'engine="0",model_name="tiny",request_class="1"}'
            for line in (
                f"stoker:class_requests_waiting{{{of_batch} 3.0",
                f"stoker:class_preemptions_total{{{of_batch} 4.0",
                f"stoker:class_aged_total{{{of_batch} 5.0",
                'stoker:class_queue_seconds_bucket{engine="0",le="1.0",model_name="tiny",request_class="1"} 2.0',
                f"stoker:class_queue_seconds_count{{{of_batch} 3.0",
                f"stoker:class_queue_seconds_sum{{{of_batch} 80.0",
                'stoker:class_requests_running{engine="0",model_name="tiny",request_class="0"} 2.0',
            ):
                assert line in text, line

    run(scenario)


def test_classes_of_several_cores_add_up() -> None:
    one = replace(STATS, classes=(ClassStats(0, 1, 2, 3, 4, 0.5, {1: 1}),))
    two = replace(STATS, classes=(ClassStats(0, 1, 1, 1, 1, 1.5, {1: 1, 2: 5}), ClassStats(3, 1, 0, 0, 0, 0.0, {})))
    assert merged_stats([one, two]).classes == (
        ClassStats(0, 2, 3, 4, 5, 2.0, {1: 2, 2: 5}), ClassStats(3, 1, 0, 0, 0, 0.0, {}),
    )  # fmt: skip
