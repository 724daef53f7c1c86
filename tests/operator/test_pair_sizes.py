"""The sizes of a prefill and a decode pool that cannot both have what they need, against the slow twin: all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.moved_work import OVERFULL, PairWork, PoolWork, joined
from stoker.operator.domain.autoscaling.pair_sizes import Bounds, PairRoom, choose_sizes
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals, PoolModel
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram

CURVE = StepCurve(base_s=0.015, prompt_token_s=8e-5, decode_token_s=1e-4)
SHAPE = EngineShape(400_000, 256, 2048, 512)
SHARE = 0.75


def sizes(*tokens: int) -> Histogram:
    found = Histogram()
    for size in tokens:
        found.add(size)
    return found


def pair_work(prompts: float, answers: float, ttft_s: float = 2.0, gap_s: float = 0.05) -> PairWork:
    """So many prompts per second at a prefill pool, and so many answers at a decode pool that computes one in ten."""
    helped = Demand(prompts, 1.2, sizes(500, 1500, 2500, 4000), 2100, 3)
    answered = Demand(answers, 1.2, sizes(*[30] * 9, 1500), 2100, 200)
    models = (PoolModel(demand, CURVE, SHAPE) for demand in (helped, answered))
    goals = Goals(first_token_s=ttft_s), Goals(gap_s=gap_s)
    prefill, decode = (PoolWork(model, goal) for model, goal in zip(models, goals, strict=True))
    return PairWork(prefill, decode)


@dataclass(frozen=True)
class Loads(PairWork):
    """Work of which each pool does its own, and half of the other one's at most."""

    loads: tuple[float, float] = (1.0, 1.0)

    def used(self, prefill: int, decode: int) -> float:
        first, second = self.loads
        alone = max(first / prefill, second / decode)
        return max((first + second) / (prefill + decode), alone / 2)


def every_pair(room: PairRoom) -> Iterator[tuple[int, int]]:
    """All sizes that can be had; none is smaller than it is."""
    for prefill, decode in itertools.product(range(room.prefill.present, 12), range(room.decode.present, 12)):
        more = prefill - room.prefill.present, decode - room.decode.present
        within = prefill <= room.prefill.most and decode <= room.decode.most
        beside = room.beside
        if within and (beside is None or (more[0] < len(beside) and more[1] <= beside[more[0]])):
            yield prefill, decode


def cheapest(work: PairWork, room: PairRoom) -> tuple[float, int]:
    """The slow twin: one pair after the other. The used share where goals are missed, and the GPUs."""
    return min((max(work.used(*pair), SHARE), _gpus(room, *pair)) for pair in every_pair(room))


def _gpus(room: PairRoom, prefill: int, decode: int) -> int:
    return prefill * room.prefill.gpus + decode * room.decode.gpus


@st.composite
def rooms(draw: Any) -> PairRoom:
    sides = []
    for _ in range(2):
        present = draw(st.integers(1, 4))
        sides.append(Bounds(present, draw(st.integers(present, 8)), 9, draw(st.integers(1, 2))))
    free = draw(st.none() | st.integers(0, 6))
    beside = None if free is None else tuple(range(free, -1, -draw(st.integers(1, 3))))
    return PairRoom(sides[0], sides[1], beside, draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(rooms(), st.floats(0.1, 12), st.floats(0.1, 12))
def test_no_pair_of_sizes_is_better_than_the_chosen_one(room: PairRoom, first: float, second: float) -> None:
    work = Loads(**vars(pair_work(1, 1)), loads=(first, second))
    found = choose_sizes(work, room, SHARE)
    assert (max(found.used, SHARE), _gpus(room, found.prefill, found.decode)) == cheapest(work, room)
    assert (found.prefill, found.decode) in set(every_pair(room)), "it can be had"


@settings(max_examples=40, deadline=None)
@given(st.floats(0.5, 20), st.floats(0.5, 20), st.integers(1, 4), st.integers(1, 4))
def test_the_used_share_is_that_of_the_best_of_all_parts(
    prompts: float, answers: float, prefill: int, decode: int
) -> None:
    """The slow twin tries each hundredth of either pool's work at the other one."""
    work = pair_work(prompts, answers)
    found = work.used(prefill, decode)
    tried = [max(work.prefill.used(prefill), work.decode.used(decode))]
    for (giver, few), (taker, many) in itertools.permutations(((work.prefill, prefill), (work.decode, decode))):
        for number in range(1, 100):
            moved = taker.with_part(giver, number / 100).used(many, work.goals)
            tried.append(max(giver.without(number / 100).used(few), moved))
    assert min(tried) * 0.98 <= found
    assert found <= min(tried) * 1.25 or found <= SHARE
    assert found <= tried[0], "nothing has to move"


def test_a_decode_pool_computes_the_prompts_that_a_full_prefill_pool_cannot() -> None:
    work = pair_work(6.0, 8.0, gap_s=0.07)
    alone = work.prefill.used(1)
    assert alone > OVERFULL, "one prefill engine cannot keep up"
    assert work.used(1, 2) > SHARE > work.used(1, 6)
    room = PairRoom(Bounds(1, 1, 99), Bounds(2, 16, 99))
    found = choose_sizes(work, room, SHARE)
    assert found.prefill == 1
    assert found.decode > 2
    assert found.used <= SHARE < work.used(1, found.decode - 1)


def test_a_prefill_pool_answers_what_a_full_decode_pool_cannot() -> None:
    work = pair_work(0.5, 25.0)
    assert work.decode.used(1) > 1
    found = choose_sizes(work, PairRoom(Bounds(1, 16, 99), Bounds(1, 1, 99)), SHARE)
    assert found.prefill > 1
    assert found.used < work.used(1, 1)


def test_one_free_gpu_goes_to_the_pool_that_it_helps_more() -> None:
    room = PairRoom(Bounds(1, 8, 99), Bounds(2, 8, 99), beside=(1, 0))
    for prompts, answers, expected in ((20.0, 8.0, (2, 2)), (1.0, 70.0, (1, 3))):
        work = pair_work(prompts, answers)
        found = choose_sizes(work, room, SHARE)
        assert (found.prefill, found.decode) == expected
        assert expected == min([(2, 2), (1, 3)], key=lambda pair: work.used(*pair))


def test_one_replica_more_is_asked_for_where_it_helps_and_none_while_one_waits() -> None:
    work = pair_work(40.0, 40.0)
    room = PairRoom(Bounds(1, 8, 99), Bounds(2, 8, 99), beside=(0,))
    assert sum(choose_sizes(work, room, SHARE).asks) == 1
    assert choose_sizes(work, replace(room, beside=(-1,)), SHARE).asks == (0, 0)
    assert choose_sizes(work, replace(room, beside=None), SHARE).asks == (0, 0)
    assert choose_sizes(work, replace(room, decode=Bounds(2, 8, 2)), SHARE).asks == (1, 0), "the other needs none"


def test_needs_can_be_had_within_max_and_the_room_with_replicas_that_change_their_role() -> None:
    room = PairRoom(Bounds(3, 8, 1), Bounds(2, 8, 5), beside=(1, 0))
    assert not room.suffices
    assert replace(room, flips=True).suffices
    assert replace(room, beside=(3, 2, 1, 0)).suffices
    assert not replace(room, beside=(3, 2, 1, 0), decode=Bounds(2, 4, 5)).suffices
    assert replace(room, beside=(-1,), decode=Bounds(2, 8, 2)).suffices, "one that waits is no lack by itself"


@pytest.mark.parametrize("part", [0.0, 0.25, 1.0])
def test_moved_work_is_neither_lost_nor_doubled(part: float) -> None:
    work = pair_work(6.0, 4.0)
    own, other = work.decode.model.demand, work.prefill.model.demand
    found = joined(own, other, part)
    kept = work.prefill.without(part).model.demand
    assert found.rate + kept.rate == pytest.approx(own.rate + other.rate)
    for name in ("uncached", "output"):
        sums = [_per_second(demand, name) for demand in (own, other, found, kept)]
        assert sums[2] + sums[3] == pytest.approx(sums[0] + sums[1], rel=0.01)


def _per_second(demand: Demand, name: str) -> float:
    value = getattr(demand, name)
    return demand.rate * (value.moment() if isinstance(value, Histogram) else value)


def test_large_pools_are_searched_by_steps() -> None:
    work = Loads(**vars(pair_work(1, 1)), loads=(150.0, 90.0))
    room = PairRoom(Bounds(1, 400, 99), Bounds(2, 400, 99), tuple(range(200, -1, -1)))
    found = choose_sizes(work, room, SHARE)
    assert found.prefill + found.decode == 203
    assert found.used == pytest.approx(240 / 203)
