"""Steps in flight over the stages of a pipeline: who takes part in which, and that no one is left out for long."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.core.request import Sequence
from tests.engine.test_scheduler import World, sampled_in


def world_of(stages: int, *, overlap: bool = False, requests: int = 0, max_tokens: int = 30) -> World:
    """A world with room for all, whose requests have computed their prompts."""
    world = World(num_blocks=400, budget=64, seats=16, stages=stages, overlap=overlap)
    for _ in range(requests):
        world.add([1], max_tokens)
    while world.scheduler.waiting or any(sequence.missing > 1 for sequence in world.scheduler.running):
        world.step()
    return world


def decoded(world: World) -> set[Sequence]:
    return sampled_in(world.step())


def test_as_many_steps_are_in_flight_as_stages_and_they_share_the_requests() -> None:
    world = world_of(3, requests=8)
    for _ in range(6):
        decoded(world)  # the prompts were one step
    parts = [decoded(world) for _ in range(6)]
    assert parts[:3] == parts[3:]
    assert sorted(map(len, parts[:3])) == [2, 3, 3]
    assert set().union(*parts[:3]) == set(world.scheduler.running)


def test_fewer_requests_than_stages_are_steps_of_one_each() -> None:
    world = world_of(4, requests=2)
    for _ in range(4):
        decoded(world)
    parts = [decoded(world) for _ in range(6)]
    assert max(map(len, parts)) == 1
    assert len(set().union(*parts)) == 2


def test_one_request_is_launched_ahead_of_its_own_token() -> None:
    world = world_of(2, overlap=True, requests=1)
    sampled = 0
    for _ in range(10):
        sampled += len(decoded(world))
        assert world.flights, "the next step is there when one ends"
    assert sampled >= 5


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    world = World(num_blocks=40, budget=4, seats=4, stages=3)
    world.add([1] * 12, max_tokens=2)
    steps = [world.step().chunks for _ in range(3)]
    assert [[(chunk.start, chunk.length) for chunk in step] for step in steps] == [[(0, 4)], [(4, 4)], [(8, 4)]]


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(2, 5),
    overlap=st.booleans(),
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    priorities=st.lists(st.integers(0, 2), min_size=36, max_size=36),
)
def test_with_room_for_all_no_request_is_left_out_for_long(
    stages: int, overlap: bool, arrivals: list[int], priorities: list[int]
) -> None:
    """Between two tokens of a request there are fewer steps than twice the stages, once no more requests come."""
    world = World(num_blocks=2000, budget=64, seats=64, stages=stages, overlap=overlap)
    for count in arrivals:
        for _ in range(count):
            world.add([1, 0], max_tokens=40, priority=priorities[len(world.requests)])
        world.step()
    last = dict.fromkeys(world.scheduler.running, 0)
    for number in range(1, 8 * stages):
        schedule = world.step()
        if not schedule.chunks:
            continue
        last |= dict.fromkeys(sampled_in(schedule), number)
        waits = [number - last.get(sequence, number) for sequence in world.scheduler.running]
        assert max(waits, default=0) <= 4 * stages
    world.finish_all()
