"""The need of a pool whose late requests wait behind the others: a fluid replay of the last minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import Limits, Memory, PoolInput
from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.late_need import Replay, needed_with_late, replayed
from stoker.operator.domain.autoscaling.need import needed_by_goals
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals
from stoker.operator.domain.autoscaling.rule import review
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram

LIMITS = Limits(1, 64, goals=Goals(first_token_s=2.0))
BEHIND = replace(LIMITS, puts_late_behind=True)
BURSTY = ((4,) * 17 + (60,)) * 10
"""Requests of each 5 s: a burst of one slot in each minute and a half."""


def pool(arrivals: tuple[int, ...], rate: float, burstiness: float = 8.0, replicas: int = 8) -> PoolInput:
    prompts = Histogram()
    prompts.add(2000.0, 100)
    return PoolInput(
        replicas, replicas, (), Demand(rate, burstiness, prompts, 2000, 20), rate, StepCurve(0.015, 8e-5, 1e-4),
        EngineShape(400_000, 128, 2048), running=1, arrivals=arrivals,
    )  # fmt: skip


def test_a_burst_needs_fewer_replicas_where_it_delays_none_but_its_own_requests() -> None:
    seen = pool(BURSTY, 12.0)
    by_goals, with_late = needed_by_goals(LIMITS, seen, 0.75), needed_with_late(LIMITS, seen, 0.75)
    assert with_late.replicas < by_goals.replicas
    assert "with late ones behind the others" in with_late.text
    replay = replayed(LIMITS, seen, 0.75)
    assert replay is not None
    assert replay.put_aside(with_late.replicas) <= 0.025 < replay.put_aside(with_late.replicas - 1)
    few = replace(seen, replicas=1, ready=1)
    assert review(0.0, LIMITS, few, Memory())[0].needed == by_goals.replicas
    assert review(0.0, BEHIND, few, Memory())[0].needed == with_late.replicas


def test_work_that_lasts_needs_what_keeps_up_with_it() -> None:
    steady, risen = (100,) * 60, (20,) * 120 + (100,) * 60  # 20 requests/s of 0.16 s at least
    for arrivals in (steady, risen):
        assert needed_with_late(LIMITS, pool(arrivals, 20.0, 1.0), 0.75).replicas == 4
    assert needed_with_late(LIMITS, pool((20,) * 180, 4.0, 1.0), 0.75).replicas < 4


@pytest.mark.parametrize(
    ("seen", "limits"),
    [
        (pool((), 5.0), LIMITS),
        (pool((4,) * 10, 5.0), LIMITS),
        (pool((0,) * 100, 5.0), LIMITS),
        (replace(pool(BURSTY, 5.0), curve=None), LIMITS),
        (replace(pool(BURSTY, 5.0), demand=None), LIMITS),
        (pool(BURSTY, 12.0), replace(LIMITS, goals=Goals(gap_s=0.2))),
        (pool(BURSTY, 12.0), replace(LIMITS, goals=Goals(first_token_s=0.01))),
        (replace(pool((), 0.0), running=0), LIMITS),
    ],
    ids=["no past", "short past", "no request", "no curve", "no demand", "other goal", "out of reach", "idle"],
)
def test_without_a_past_or_a_goal_the_prediction_decides(seen: PoolInput, limits: Limits) -> None:
    assert needed_with_late(limits, seen, 0.75) == needed_by_goals(limits, seen, 0.75)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0, 5), st.integers(1, 20))
def test_more_copies_put_less_aside_and_nothing_is_lost(work: list[float], wait_s: float, copies: int) -> None:
    replay = Replay(5.0, tuple(work), wait_s)
    assert 0.0 <= replay.put_aside(copies + 1) <= replay.put_aside(copies) + 1e-9
    assert replay.put_aside(copies) <= 1.0 + 1e-9
    if max(work) <= copies * (5.0 + wait_s) and sum(work) <= copies * 5.0:
        assert replay.put_aside(copies) == 0.0
