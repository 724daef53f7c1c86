"""Stragglers: named when they are late step after step, never by noise; measured on real ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.trainer.rank.busy_clock import BusyClock
from stoker.trainer.rank.compile_clock import CompileClock
from stoker.trainer.rank.stragglers import CLEARED, NAMED, RATIO, WINDOW, StragglerWatch, is_late


def watch(ranks: int) -> StragglerWatch:
    return StragglerWatch([range(ranks)])


def fed(found: StragglerWatch, steps: Sequence[Sequence[float]]) -> list[set[int]]:
    """The ranks that are named after each step."""
    named: list[set[int]] = []
    for step in steps:
        answer = found.add(step)
        if answer is not None:
            named.append({straggler.rank for straggler in answer})
        else:
            named.append(named[-1] if named else set())
    return named


# No false alarms


@given(st.integers(1, 12), st.data())
def test_noise_below_the_ratio_names_no_rank_ever(ranks: int, data: st.DataObject) -> None:
    base = data.draw(st.floats(0.001, 10))
    noise = st.lists(st.floats(1.0, RATIO - 1e-6), min_size=ranks, max_size=ranks)
    steps = data.draw(st.lists(noise, max_size=3 * WINDOW))
    assert all(named == set() for named in fed(watch(ranks), [[base * x for x in step] for step in steps]))


@given(st.integers(2, 6), st.lists(st.integers(0, 5), min_size=WINDOW, max_size=4 * WINDOW), st.floats(1.3, 100))
def test_a_rank_that_is_late_too_seldom_is_not_named(ranks: int, late: list[int], factor: float) -> None:
    """At most one rank is late in a step, and none in `NAMED` of any window."""
    steps = [[factor if rank == chosen else 1.0 for rank in range(ranks)] for chosen in late]
    named = fed(watch(ranks), steps)
    for end in range(1, len(steps) + 1):
        window = late[max(0, end - WINDOW) : end]
        allowed = {rank for rank in range(ranks) if window.count(rank) >= CLEARED}
        assert named[end - 1] <= allowed
        assert {rank for rank in range(ranks) if window.count(rank) >= NAMED} <= named[end - 1]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_are_late_by_chance_are_not_named(seed: int) -> None:
    """Each of 64 ranks takes twice as long in a tenth of its steps, more than that in some."""
    draw = random.Random(seed)
    steps = [[draw.uniform(1, 1.1) * draw.choice([1] * 9 + [2]) for _ in range(64)] for _ in range(1000)]
    assert all(named == set() for named in fed(watch(64), steps))


# True ones


@given(st.integers(2, 12), st.data())
def test_a_slow_rank_is_named_within_the_window_and_forgotten_when_it_recovers(ranks: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    noise = st.lists(st.floats(1.0, 1.1), min_size=ranks, max_size=ranks)
    factor = data.draw(st.floats(RATIO * 1.11, 50))
    sick = [[x * (factor if rank == slow else 1) for rank, x in enumerate(data.draw(noise))] for _ in range(WINDOW)]
    well = [[1.0] * ranks for _ in range(WINDOW)]
    found = watch(ranks)
    assert fed(found, sick)[-1] == {slow}
    assert fed(found, well)[-1] == set()


@given(st.lists(st.floats(0.5, 5), min_size=6, max_size=6))
def test_at_most_half_of_the_peers_are_late(step: list[float]) -> None:
    named = fed(watch(6), [step] * WINDOW)[-1]
    assert named == {rank for rank in range(6) if is_late(step[rank], sorted(step)[2])}
    assert len(named) <= 3


@given(st.permutations(range(5)), st.lists(st.lists(st.floats(0.1, 2), min_size=5, max_size=5), max_size=WINDOW))
def test_the_numbers_of_the_ranks_do_not_matter(order: list[int], steps: list[list[float]]) -> None:
    plain = fed(watch(5), steps)
    moved = fed(watch(5), [[step[rank] for rank in order] for step in steps])
    assert [{order[rank] for rank in named} for named in moved] == plain


def test_stages_are_compared_within_themselves() -> None:
    found = StragglerWatch([(0, 1, 2), (3, 4, 5)])
    assert fed(found, [[1.0, 1.0, 1.0, 3.0, 3.0, 3.0]] * WINDOW)[-1] == set(), "the last stage has more to do"
    assert fed(found, [[1.0, 1.0, 1.0, 3.0, 5.0, 3.0]] * WINDOW)[-1] == {4}


def test_a_straggler_is_described_by_medians_and_a_step_without_times_is_left_out() -> None:
    found = watch(3)
    assert found.add([0.0, 1.0, 1.0]) is None
    answers = [found.add([0.5, 0.5, 0.9]) for _ in range(NAMED)]
    assert [answer for answer in answers[:-1] if answer is not None] == []
    (straggler,) = answers[-1] or ()
    assert (straggler.rank, straggler.busy_s, straggler.typical_s) == (2, 0.9, 0.5)
    assert straggler.ratio == pytest.approx(1.8)
    assert found.add([0.5, 0.5, 0.9]) is None, "nothing new"


def test_one_rank_alone_is_never_late() -> None:
    assert fed(watch(1), [[float(1 + step)] for step in range(WINDOW)])[-1] == set()


# Measured


def test_the_clock_takes_the_time_until_a_rank_is_ready_to_meet_the_others() -> None:
    times = iter([10.0, 10.5])
    clock = BusyClock(torch.device("cpu"), clock=lambda: next(times))
    assert clock.seconds() == 0
    clock.start()
    assert clock.seconds() == 0
    clock.stop()
    assert clock.seconds() == 0.5


def test_compilations_are_added_up_and_hits_of_the_cache_cost_nothing() -> None:
    clock = CompileClock(torch.device("cpu"))
    for total, hit in ((1_500_000, False), (9_000_000, True), (500_000, False)):
        clock.note(src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=total), cache_hit=hit)
    assert clock.seconds == 2.0
