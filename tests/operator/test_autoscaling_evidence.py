"""What a pool has shown: shares within goals, demand that rose since, and a rule that adds nothing to what suffices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import REVIEW_S, Limits, Measured, Memory, PoolInput
from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.evidence import Evidence, has_risen, is_proven, met_share
from stoker.operator.domain.autoscaling.goal_report import GoalReport, read_goals
from stoker.operator.domain.autoscaling.load_window import LoadWindow
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals
from stoker.operator.domain.autoscaling.rule import MEASURED_S, review
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram
from testing.operator.engine_load import report

GOALS = Goals(first_token_s=2.0, gap_s=0.3)
LIMITS = Limits(1, 64, goals=GOALS)
STEADY = (20, 22, 18, 21, 19, 20) * 15


def times(*counted: tuple[float, int]) -> Histogram:
    found = Histogram()
    for value, count in counted:
        found.add(value, count)
    return found


def shown(met: int, late: int, arrivals: tuple[int, ...] = STEADY) -> Evidence:
    return Evidence(5.0, arrivals, times((0.5, met), (9.0, late)), times((0.02, 50 * met)))


def pool(replicas: int, rate: float, evidence: Evidence, **changes: object) -> PoolInput:
    prompts = times((1000, 1), (2000, 1), (4000, 1))
    seen = PoolInput(
        replicas, replicas, (), Demand(rate, 1.0, prompts, 2000, 100), rate, StepCurve(0.01, 5e-5, 2e-4),
        EngineShape(400_000, 128, 4096), running=1, startup_s=60.0, evidence=evidence,
    )  # fmt: skip
    return replace(seen, **changes)  # type: ignore[arg-type]


# Evidence


def test_a_share_counts_the_bucket_of_the_goal_in_proportion() -> None:
    found = times((0.5, 10), (9.0, 10))
    assert found.share_within(0.4) == 0.0
    assert found.share_within(0.6) == found.share_within(7.9) == 0.5
    assert found.share_within(100.0) == Histogram().share_within(1.0) == 1.0
    assert 0.0 < times((1.05, 1)).share_within(1.05) < 1.0


def test_the_worse_goal_counts_and_one_that_is_not_set_does_not() -> None:
    found = Evidence(5.0, STEADY, times((0.5, 96), (9.0, 4)), times((0.02, 90), (1.0, 10)))
    assert met_share(found, GOALS) == pytest.approx(0.9)
    assert met_share(found, Goals(first_token_s=2.0)) == pytest.approx(0.96)
    assert met_share(found, Goals(gap_s=2.0)) == 1.0


def test_too_few_requests_and_those_that_wait_too_long_prove_nothing() -> None:
    assert is_proven(shown(95, 5), GOALS)
    assert not is_proven(shown(94, 6), GOALS)
    assert not is_proven(shown(49, 0), GOALS)
    assert not is_proven(shown(95, 5), GOALS, overdue=1.0)
    assert not is_proven(Evidence(), GOALS)


def test_requests_that_routers_keep_waiting_or_refuse_are_missed_goals() -> None:
    found = shown(100, 0)
    assert met_share(replace(found, late=5), GOALS) == pytest.approx(0.95)
    assert met_share(replace(found, late=200), GOALS) == 0.0
    assert met_share(replace(found, refused=25), GOALS) == pytest.approx(0.8)
    assert met_share(replace(found, late=5, refused=25), Goals(gap_s=0.3)) == 1.0
    assert is_proven(replace(found, refused=5), GOALS)
    assert not is_proven(replace(found, late=3, refused=3), GOALS)


def test_a_window_counts_what_routers_keep_back_once() -> None:
    window = LoadWindow()
    waiting = {10: 0, 20: 30, 30: 30, 40: 0}
    for second in range(0, 60, 2):
        ours = GoalReport(waiting.get(second // 10 * 10, 0), late=second // 40 * 20, refused=second)
        window.record(float(second), "engine", report(second + (30 if second >= 40 else 0), second))
        window.record_router(float(second), "router", ours)
    found = window.evidence(60.0, 1)
    assert sum(found.arrivals) == pytest.approx(53 + 30 + 53, abs=6), "30 waited, then came to the engine"
    assert max(found.arrivals) > 30
    assert min(found.arrivals) >= 0
    assert (found.late, found.refused) == (20, 54)
    assert window.measured(60.0).late_share == pytest.approx(74 / (58 + 54), abs=0.1)
    assert window.waiting_in_routers == 0
    window.record_router(60.0, "router", GoalReport(7, 0, 0))
    assert window.evidence(70.0, 1).refused == 54, "a router that began anew tells nothing of before"
    assert window.waiting_in_routers == 7
    window.forget(["engine"])
    assert window.waiting_in_routers == 0


@pytest.mark.parametrize("goals", [None, {"waiting": 1}, {"waiting": 1, "late": "x", "refused": 0}])
def test_routers_without_goals_tell_nothing(goals: object) -> None:
    assert read_goals({"goals": goals}) is None
    assert read_goals({"goals": {"waiting": 1, "late": 2, "refused": 3, "more": 4}}) == GoalReport(1, 2, 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(24, 180), st.floats(1.5, 10))
def test_a_constant_rate_has_not_risen_and_a_lasting_one_above_chance_has(rate: int, slots: int, factor: float) -> None:
    assert not has_risen([rate] * slots, 5.0)
    higher = round(rate * factor)
    if (higher - rate) * 12 > 10 * (12 * rate * 2) ** 0.5:
        assert has_risen([rate] * (slots - 12) + [higher] * 12, 5.0)


def test_a_slow_ramp_shows_in_five_minutes_and_a_burst_of_bursty_clients_does_not() -> None:
    ramp = [20 + number // 4 for number in range(180)]
    assert has_risen(ramp, 5.0)
    bursts = [0, 0, 60, 0, 0, 0] * 29 + [0, 60, 60, 0, 0, 0]
    assert not has_risen(bursts, 5.0)
    assert has_risen([20] * 23, 5.0), "less than two minutes tell nothing"


def test_a_window_shows_what_no_more_engines_than_the_present_ones_did() -> None:
    window = LoadWindow()
    for second in range(0, 400, 2):
        for engine in ("a", "b") if second < 200 else ("a",):
            window.record(float(second), engine, report(second, second // 2))
    one, two = window.evidence(400.0, 1), window.evidence(400.0, 2)
    assert len(one.arrivals) == 40
    assert len(two.arrivals) == 79
    assert sum(one.arrivals) == one.first_token_s.total * 2 == pytest.approx(200, abs=6)
    assert sum(two.arrivals) == pytest.approx(590, abs=10)
    assert met_share(two, GOALS) == 1.0
    assert window.evidence(400.0, 0).arrivals == ()
    assert LoadWindow().evidence(0.0, 1).first_token_s.total == 0


# The rule


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.floats(0.1, 300), st.integers(0, 300), st.integers(0, 30), st.integers(0, 500))
def test_evidence_never_adds_a_replica_nor_takes_one_away(
    replicas: int, rate: float, met: int, late: int, waiting: int
) -> None:
    seen = pool(replicas, rate, shown(met, late), waiting=waiting)
    with_it, _ = review(0.0, LIMITS, seen, Memory())
    without, _ = review(0.0, LIMITS, replace(seen, evidence=Evidence()), Memory())
    assert min(replicas, without.after) <= with_it.after <= without.after


def test_replicas_that_met_the_goals_suffice_whatever_is_predicted() -> None:
    decision, memory = review(0.0, LIMITS, pool(2, 40.0, shown(970, 30)), Memory())
    assert (decision.after, decision.reason) == (2, "Sufficient")
    assert decision.message == "97.0% of the last minutes' requests met the goals with 2"
    assert memory.short_s is None
    for evidence in (shown(940, 60), shown(970, 30, (20,) * 168 + (40,) * 12), Evidence()):
        assert review(0.0, LIMITS, pool(2, 40.0, evidence), Memory())[0].reason == "Load"
    assert review(0.0, LIMITS, pool(2, 40.0, shown(970, 30), waiting=500), Memory())[0].reason == "Load"


def test_replicas_that_still_start_are_no_proof() -> None:
    decision, _ = review(0.0, LIMITS, pool(2, 40.0, shown(970, 30), ready=1), Memory())
    assert decision.reason == "Load"


def test_a_minute_in_which_routers_turn_many_away_counts_as_missed() -> None:
    for share, after in ((0.04, 8), (0.2, 9)):
        seen, memory, sizes = pool(8, 5.0, shown(900, 100), measured=Measured(0.5, 0.02, share)), Memory(), []
        for number in range(round(MEASURED_S / REVIEW_S) + 1):
            decision, memory = review(number * REVIEW_S, LIMITS, seen, memory)
            sizes.append(decision.after)
        assert sizes[-1] == after
        assert decision.inputs["lateShare"] == f"{share:.3f}"


def test_a_bad_minute_within_good_minutes_adds_no_replica() -> None:
    for evidence, after in ((shown(970, 30), 8), (shown(900, 100), 9)):
        seen, memory, sizes = pool(8, 5.0, evidence, measured=Measured(first_token_s=3.0)), Memory(), []
        for number in range(round(MEASURED_S / REVIEW_S) + 1):
            decision, memory = review(number * REVIEW_S, LIMITS, seen, memory)
            sizes.append(decision.after)
        assert sizes[-1] == after
