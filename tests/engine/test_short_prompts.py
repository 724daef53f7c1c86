"""Short prompts beside a long one: they need not wait for its end, and it keeps half of every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.core.request import Request, State
from stoker.engine.core.schedule import Schedule
from tests.engine.test_scheduler import World

BUDGET, LONG = 8, 80
FRESH = iter(range(1000, 10**9))


def prompt(length: int) -> list[int]:
    """One that has no beginning in common with another."""
    return [next(FRESH) for _ in range(length)]


def world(**options: Any) -> World:
    return World(**{"num_blocks": 400, "budget": BUDGET, "seats": 6} | options)


def tokens_of(schedule: Schedule, request: Request) -> int:
    return sum(chunk.length for chunk in schedule.chunks if chunk.sequence.request is request)


def begins_at_once(made: World, request: Request) -> bool:
    return tokens_of(made.step(), request) > 0


def test_a_short_prompt_does_not_wait_for_a_long_ones_end() -> None:
    made = world()
    long = made.add(prompt(LONG), 1)
    made.step()
    short = made.add(prompt(6), 1)
    steps = [made.step() for _ in range(2)]
    assert [tokens_of(step, short) for step in steps] == [4, 2]
    assert [tokens_of(step, long) for step in steps] == [4, 6]
    assert short.finished


def test_the_shortest_goes_first_whether_it_waits_or_runs() -> None:
    made = world()
    made.add(prompt(LONG), 1)
    made.step()
    longer, short = made.add(prompt(20), 1), made.add(prompt(4), 1)
    assert begins_at_once(made, short)
    assert longer.sequences[0].state is State.WAITING
    assert begins_at_once(made, longer)
    shortest = made.add(prompt(3), 1)
    step = made.step()
    assert (tokens_of(step, shortest), tokens_of(step, longer)) == (3, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({}, {"length": LONG // 2}, id="of a similar length"),
        pytest.param({}, {"priority": 1}, id="of a lower priority"),
        pytest.param({}, {"place": 1}, id="of a lower class"),
        pytest.param({"length": BUDGET + 4}, {}, id="beside a prompt that ends in this step"),
    ],
)
def test_no_other_prompt_goes_first(first: dict[str, int], second: dict[str, int]) -> None:
    made = world()
    long = made.add(prompt(first.get("length", LONG)), 1)
    made.step()
    options = {"length": 2} | second
    late = made.add(prompt(options.pop("length")), 1, **options)
    step = made.step()
    assert tokens_of(step, long) == min(BUDGET, first.get("length", LONG) - BUDGET)
    assert bool(tokens_of(step, late)) == ("length" in first)  # behind it there may be room


def test_none_goes_before_an_aged_one() -> None:
    made = world(aging_s=3.0, seats=1)
    made.add(prompt(2), 6)
    aged = made.add(prompt(LONG), 1, place=1)
    while not tokens_of(made.step(), aged):
        made.add(prompt(2), 2)
    short = made.add(prompt(2), 1)
    assert not begins_at_once(made, short)


def test_a_short_prompt_without_room_does_not_take_the_long_ones_part() -> None:
    made = world(num_blocks=LONG // 2 + 2)
    long = made.add(prompt(LONG), 1)
    made.step()
    made.add(prompt(12), 1)
    assert tokens_of(made.step(), long) == BUDGET


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=12))
def test_the_first_prompt_keeps_half_of_every_step(arrivals: list[tuple[int, int, int]]) -> None:
    made = world(seats=8, worth_tokens=4)
    due = sorted(arrivals, key=lambda one: one[0])
    while due or made.scheduler.has_unfinished:
        while due and due[0][0] <= made.steps:
            _, length, outputs = due.pop(0)
            made.add(prompt(length), outputs)
        running = [one for one in made.scheduler.running if one.missing > 1]
        first, missing = (running[0], running[0].missing) if running else (None, 0)
        step = made.step()
        made.scheduler.audit()
        if first is not None:
            decodes = sum(chunk.length == 1 and bool(chunk.samples) for chunk in step.chunks)
            least = min(missing, (BUDGET - decodes) // 2)
            assert tokens_of(step, first.request) >= least
        assert made.steps < 1000
    assert all(request.finished for request in made.requests)
