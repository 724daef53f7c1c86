"""The autoscaler's rule: bounds, unknown inputs, proofs, no swinging, zero and back, goals out of reach."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import REVIEW_S, Change, Decision, Limits, Measured, Memory, PoolInput
from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.need import BUSY, needed_by_goals
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals, PoolModel
from stoker.operator.domain.autoscaling.record import first_record
from stoker.operator.domain.autoscaling.rule import MEASURED_S, review
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram

CURVE = StepCurve(base_s=0.01, prompt_token_s=5e-5, decode_token_s=2e-4)
SHAPE = EngineShape(kv_tokens=400_000, max_requests=128, max_batch_tokens=4096)
GOALS = Goals(first_token_s=2.0, gap_s=0.3)


def sizes(*tokens: int) -> Histogram:
    found = Histogram()
    for size in tokens:
        found.add(size)
    return found


PROMPTS = sizes(200, 1000, 1500, 2000, 2500, 4000)


def pool(replicas: int, rate: float, **changes: object) -> PoolInput:
    """A pool whose replicas are all ready and whose demand is known."""
    demand = Demand(rate, 1.0, PROMPTS, prompt=PROMPTS.moment(), output=100)
    busy = 1 if rate else 0
    seen = PoolInput(replicas, replicas, (), demand, rate, CURVE, SHAPE, running=busy, startup_s=60.0)
    return replace(seen, **changes)  # type: ignore[arg-type]


def run(limits: Limits, seen: PoolInput, seconds: float, memory: Memory, begin_s: float = 0.0) -> list[Decision]:
    """Review a pool that follows each decision at once."""
    decisions = []
    for number in range(round(seconds / REVIEW_S)):
        decision, memory = review(begin_s + number * REVIEW_S, limits, seen, memory)
        seen = replace(seen, replicas=decision.after, ready=decision.after)
        decisions.append(decision)
    return decisions


POOLS = st.builds(
    lambda replicas, rate, ready, unknown, held, curve: pool(
        replicas, rate, ready=min(ready, replicas), unknown=("engine e",) * unknown, held=held,
        curve=CURVE if curve else None,
    ),
    st.integers(0, 20), st.floats(0, 200), st.integers(0, 20), st.booleans(), st.integers(0, 3), st.booleans(),
)  # fmt: skip
LIMITS = st.builds(
    lambda low, more, mode, goal, room: Limits(
        low, max(low + more, 1), mode, Goals(goal, None), scale_down_after_s=60, placeable=room
    ),
    st.integers(0, 6), st.integers(0, 12), st.sampled_from(["slo", "load"]), st.floats(0.001, 10),
    st.none() | st.integers(0, 10),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(LIMITS, st.lists(POOLS, min_size=1, max_size=30))
def test_a_review_stays_in_the_limits_grows_at_most_twofold_and_shrinks_by_one(
    limits: Limits, history: list[PoolInput]
) -> None:
    memory, replicas = Memory(), history[0].replicas
    for number, found in enumerate(history):
        seen = replace(found, replicas=replicas, ready=min(found.ready, replicas))
        decision, memory = review(number * REVIEW_S, limits, seen, memory)
        assert limits.min <= decision.after <= limits.max
        if limits.min <= replicas <= limits.max:
            assert replicas - 1 <= decision.after <= max(2 * replicas, replicas + 1, limits.min)
            assert not (seen.unknown and replicas and decision.after != replicas), "unknown inputs hold the pool"
        replicas = decision.after


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 100), st.floats(1, 3), st.floats(0.2, 10), st.integers(1, 30))
def test_more_load_never_needs_fewer_replicas(rate: float, factor: float, goal: float, replicas: int) -> None:
    limits = Limits(1, 1000, goals=Goals(goal, None))
    low = needed_by_goals(limits, pool(replicas, rate), 0.8)
    high = needed_by_goals(limits, pool(replicas, rate * factor), 0.8)
    assert low.replicas <= high.replicas
    assert low.replicas <= needed_by_goals(limits, pool(replicas, rate), 0.7).replicas


@settings(max_examples=12, deadline=None)
@given(st.floats(0, 60), st.integers(1, 12))
def test_a_constant_load_ends_in_one_number_of_replicas(rate: float, replicas: int) -> None:
    limits = Limits(1, 16, goals=GOALS, scale_down_after_s=60)
    decisions = run(limits, pool(replicas, rate), 2400, Memory())
    changes = [found.after - found.before for found in decisions if found.after != found.before]
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes)
    assert len({found.after for found in decisions[-60:]}) == 1


def test_fewer_replicas_need_a_whole_proof_that_each_break_begins_anew() -> None:
    limits = Limits(1, 16, goals=GOALS, scale_down_after_s=300)
    small, memory, down = pool(4, 1.0), Memory(), []
    need = needed_by_goals(limits, small, 0.7).replicas
    assert need < 4
    for number in range(200):
        now_s = number * REVIEW_S
        seen = pool(4, 60.0) if number == 40 else small
        seen = replace(seen, unknown=("the load of engine e is 20 s old",)) if number == 100 else seen
        decision, memory = review(now_s, replace(limits, max=4), seen, memory)
        if decision.after < decision.before:
            down.append(now_s)
            assert decision.reason == "Proven"
    assert down[0] == 101 * REVIEW_S + 300
    assert down[0] - 100 * REVIEW_S > 300 - REVIEW_S


def test_an_unknown_input_is_named_and_holds_the_pool() -> None:
    line = "the load of engine chat-main-0 is 16 s old"
    decision, memory = review(0.0, Limits(1, 8, goals=GOALS), pool(3, 500.0, unknown=(line,)), Memory())
    assert (decision.after, decision.reason, decision.message) == (3, "Unknown", f"not known: {line}")
    assert memory.needs == ()


def test_an_idle_pool_goes_to_zero_and_a_held_request_wakes_it() -> None:
    limits = Limits(0, 4, goals=GOALS, scale_down_after_s=60)
    idle = replace(pool(2, 0.0), demand=Demand(0.0, 1.0, PROMPTS, 0.0, 0.0))
    decisions = run(limits, idle, 300, Memory())
    assert [found.after for found in decisions if found.after != found.before] == [1, 0]
    assert next(found.reason for found in decisions if found.after == 0) == "Idle"
    assert decisions[-1].reason == "Sufficient"
    decision, _ = review(300.0, limits, replace(idle, replicas=0, ready=0, held=3), Memory())
    assert (decision.after, decision.reason) == (1, "Wake")
    busy = replace(idle, replicas=1, ready=1, running=1)
    assert {found.after for found in run(limits, busy, 600, Memory())} == {1}, "a running request is not idleness"
    assert run(replace(limits, min=1), idle, 600, Memory())[-1].after == 1


def test_a_goal_that_no_number_reaches_is_named_and_the_pool_keeps_up() -> None:
    limits = Limits(1, 8, goals=Goals(first_token_s=0.02), scale_down_after_s=60)
    decisions = run(limits, pool(8, 30.0), 900, Memory())
    last = decisions[-1]
    assert last.reason == "InfeasibleGoal"
    assert last.infeasible is not None
    assert "no number of replicas reaches ttftMs 20: the best is ttft 2" in last.infeasible
    assert 1 < last.after < 8, "as many as keep up with the work, not as many as allowed"


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.1, 3000), st.integers(0, 3), st.integers(0, 300), st.integers(1, 3),
    st.integers(100, 400_000), st.integers(1, 256), st.one_of(st.just(0.0), st.floats(1e-6, 0.05)),
)  # fmt: skip
def test_a_pool_that_cannot_reach_its_goals_has_the_first_number_that_keeps_up(
    rate: float, least: int, most: int, copies: int, kv_tokens: int, max_requests: int, token_s: float
) -> None:
    """The slow twin tries one number after the other."""
    limits = Limits(min(least, most), most, goals=Goals(first_token_s=1e-6))
    shape, curve = EngineShape(kv_tokens, max_requests, 4096), replace(CURVE, decode_token_s=token_s)
    seen = pool(1, rate, copies=copies, shape=shape, curve=curve)
    assert seen.demand is not None
    model = PoolModel(seen.demand, curve, shape, copies)
    predicted = ((count, model.at(count)) for count in range(max(limits.min, 1), limits.max + 1))
    expected = next((count for count, found in predicted if found.fits and found.busy <= BUSY), limits.max)
    need = needed_by_goals(limits, seen, 0.8)
    assert need.infeasible is not None
    assert need.replicas == expected


def test_a_decode_pool_needs_more_replicas_for_the_prompts_that_it_computes_itself() -> None:
    limits, rate = Limits(1, 100, goals=Goals(gap_s=0.03)), 60.0
    helped = pool(1, rate)
    assert helped.demand is not None
    helped = replace(helped, demand=replace(helped.demand, uncached=sizes(*[20] * 95, *[1500] * 5)))
    few, all_here = (needed_by_goals(limits, seen, 0.75).replicas for seen in (helped, pool(1, rate)))
    assert few < all_here


def test_a_pool_grows_to_its_max_and_says_that_it_needs_more() -> None:
    decisions = run(Limits(1, 6, goals=GOALS), pool(1, 200.0), 60, Memory())
    assert [found.after for found in decisions[:3]] == [2, 4, 6]
    assert decisions[-1].reason == "AtMax"
    assert decisions[-1].needed is not None
    assert decisions[-1].needed > 6


def test_a_pool_asks_for_one_replica_more_than_there_is_room_for() -> None:
    decision, _ = review(0.0, Limits(1, 16, goals=GOALS, placeable=5), pool(4, 200.0), Memory())
    assert (decision.after, decision.reason) == (6, "WaitingForRoom")
    assert "there is room for 5 replicas" in decision.message
    decision, _ = review(0.0, Limits(1, 16, goals=GOALS, placeable=5), pool(6, 200.0), Memory())
    assert (decision.after, decision.reason) == (6, "WaitingForRoom")


def test_a_goal_missed_against_the_prediction_adds_a_replica_while_the_demand_lasts() -> None:
    limits = Limits(1, 16, goals=GOALS, scale_down_after_s=60)
    need = needed_by_goals(limits, pool(1, 20.0), 0.8).replicas
    late, memory = pool(need, 20.0, measured=Measured(first_token_s=3.0)), Memory()
    for number in range(round(MEASURED_S / REVIEW_S)):
        decision, memory = review(number * REVIEW_S, limits, late, memory)
        assert (decision.after, decision.reason) == (need, "Sufficient")
    decision, memory = review(MEASURED_S, limits, late, memory)
    assert (decision.before, decision.after, decision.reason) == (need, need + 1, "Missed")
    better, begin_s = pool(need + 1, 20.0, measured=Measured(first_token_s=1.0)), MEASURED_S + REVIEW_S
    assert {found.after for found in run(limits, better, 800, memory, begin_s)} == {need + 1}
    assert run(limits, pool(need + 1, 2.0), 800, memory, begin_s)[-1].after < need, "less demand needs no such floor"


@pytest.mark.parametrize("between", [{}, {"unknown": ("the load of engine e is 20 s old",)}], ids=["met", "unknown"])
def test_a_miss_that_ends_within_a_minute_adds_no_replica(between: dict[str, object]) -> None:
    """Again and again, each time for one review less than counts; unknown inputs end a miss, too."""
    limits = Limits(1, 16, goals=GOALS, scale_down_after_s=60)
    need = needed_by_goals(limits, pool(1, 20.0), 0.8).replicas
    late, memory = pool(need, 20.0, measured=Measured(first_token_s=3.0)), Memory()
    other = replace(late, **between) if between else pool(need, 20.0, measured=Measured(first_token_s=1.0))  # type: ignore[arg-type]
    lasting = round(MEASURED_S / REVIEW_S)
    for number in range(5 * (lasting + 1)):
        seen = other if number % (lasting + 1) == lasting else late
        decision, memory = review(number * REVIEW_S, limits, seen, memory)
        assert decision.after == need
    assert memory.missed_at == 0


def test_a_second_change_of_direction_waits() -> None:
    limits = Limits(1, 16, goals=GOALS, scale_down_after_s=60)
    low, high = pool(1, 2.0), pool(1, 30.0)
    few, many = (needed_by_goals(limits, found, 0.8).replicas for found in (low, high))
    assert few < many
    memory, replicas, turns = Memory(), few, []
    going: int = 0
    for number in range(1440):
        wave = high if number % 48 < 6 else low  # half a minute of each four
        now_s = number * REVIEW_S
        decision, memory = review(now_s, limits, replace(wave, replicas=replicas, ready=replicas), memory)
        change = decision.after - replicas
        if change and going and (change > 0) != (going > 0):
            turns.append(now_s)
        going, replicas = change or going, decision.after
    downs = turns[0::2]
    assert all(later - earlier >= 600 for earlier, later in itertools.pairwise(downs))
    assert turns


BURSTS = st.lists(st.tuples(st.integers(2, 130), st.integers(1, 11), st.floats(0.6, 150)), min_size=3, max_size=8)
"""(reviews of rest, reviews of a burst that is shorter than a start, requests/s)."""


def turns(decisions: list[Decision]) -> list[float]:
    """Times at which the pool changed its direction."""
    changes = [found for found in decisions if found.after != found.before]
    pairs = itertools.pairwise(changes)
    return [after.at_s for before, after in pairs if (before.after > before.before) != (after.after > after.before)]


@settings(max_examples=12, deadline=None)
@given(BURSTS, st.integers(1, 30), st.floats(0, 1), st.booleans())
def test_bursts_shorter_than_a_start_change_the_direction_at_most_once_in_ten_minutes(
    bursts: list[tuple[int, int, float]], replicas: int, remembered: float, missed: bool
) -> None:
    """`remembered`: the share of the last burst that the forecast still expects at rest."""
    memory, now_s, decisions, before = Memory(), 0.0, list[Decision](), 0.0
    limits = Limits(1, 64, goals=GOALS)
    for rest, length, rate in bursts:
        for present in [0.5] * rest + [rate] * length:
            seen = pool(replicas, present, measured=Measured(9.0 if missed and present > 0.5 else 0.1, 0.01))
            forecast = max(present, remembered * before)
            assert seen.demand is not None
            seen = replace(seen, demand=replace(seen.demand, rate=forecast))
            decision, memory = review(now_s, limits, seen, memory)
            decisions.append(decision)
            replicas, now_s = decision.after, now_s + REVIEW_S
        before = rate
    assert all(late - early >= 600 for early, late in itertools.pairwise(turns(decisions)))


def test_work_that_outlasts_a_start_gets_replicas_soon_after_the_pool_went_down() -> None:
    limits = Limits(1, 64, goals=GOALS, scale_down_after_s=60)
    needed = needed_by_goals(limits, pool(1, 20.0), 0.8).replicas
    decisions = run(limits, pool(needed, 0.5), 100, Memory())
    assert decisions[-1].after < needed
    memory, seen = Memory(changes=tuple(changes_of(decisions, needed))), pool(decisions[-1].after, 20.0)
    surge = run(limits, seen, 120, memory, begin_s=100)
    added = next(found for found in surge if found.after > found.before)
    assert {found.reason for found in surge if found.at_s < added.at_s} == {"Burst"}
    assert added.at_s - 100 == seen.startup_s


def changes_of(decisions: list[Decision], risen_to: int) -> list[Change]:
    """The changes of these decisions, after one that added replicas long ago."""
    found = [Change(one.at_s, one.before, one.after) for one in decisions if one.after != one.before]
    return [Change(-1000.0, 1, risen_to), *found]


@pytest.mark.parametrize(
    ("seen", "after"),
    [
        (pool(2, 5.0, kv_use=0.9, running=20), 3),
        (pool(2, 5.0, kv_use=0.6, running=20), 2),
        (pool(2, 5.0, kv_use=0.1, running=20, waiting=5), 3),
        (pool(2, 5.0, kv_use=0.1, running=250), 3),
        (pool(2, 5.0, kv_use=0.1, running=20, waiting=5, ready=1), 2),
    ],
    ids=["cache", "between", "queue", "seats", "one starts"],
)
def test_load_mode_scales_by_thresholds(seen: PoolInput, after: int) -> None:
    decision, _ = review(0.0, Limits(1, 8, mode="load"), seen, Memory())
    assert decision.after == after


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_in_a_replica_share_its_demand_and_its_seats(copies: int) -> None:
    limits = Limits(1, 100, goals=GOALS)
    alone = needed_by_goals(limits, pool(1, 200.0), 0.75).replicas
    assert alone > copies
    assert needed_by_goals(limits, pool(1, 200.0, copies=copies), 0.75).replicas == -(-alone // copies)
    full = pool(2, 1.0, running=2 * SHAPE.max_requests, waiting=5)
    decision, _ = review(0, Limits(1, 8, mode="load"), full, Memory())
    assert decision.after == 3
    decision, _ = review(0, Limits(1, 8, mode="load"), replace(full, copies=copies), Memory())
    assert (decision.after, decision.inputs["copies"]) == (2, str(copies))


def test_load_mode_goes_down_where_fewer_would_not_be_full() -> None:
    limits = Limits(1, 8, mode="load", scale_down_after_s=60)
    for waiting, last in ((0, 2), (1, 4)):
        memory, replicas = Memory(), 4
        for number in range(120):
            seen = pool(replicas, 5.0, kv_use=0.8 / replicas, running=4, waiting=waiting)
            decision, memory = review(number * REVIEW_S, limits, seen, memory)
            replicas = decision.after
        assert replicas == last


def test_changes_and_obstacles_are_kept_and_repetitions_are_not() -> None:
    limits = Limits(1, 2, goals=GOALS)
    decisions = run(limits, pool(1, 200.0), 100, Memory())
    record = first_record(decisions[0], "t0")
    for number, decision in enumerate(decisions[1:], 1):
        record = record.then(decision, f"t{number}")
    kept = [(found.time, found.decision.reason, found.decision.after) for found in record.log]
    assert kept == [("t0", "Load", 2), ("t1", "AtMax", 2)]
    assert record.newest is decisions[-1]


def test_a_pool_that_has_not_begun_to_serve_is_not_idle() -> None:
    limits, memory = Limits(0, 4, goals=GOALS, scale_down_after_s=60), Memory()
    idle = replace(pool(1, 0.0), demand=Demand(0.0, 1.0, PROMPTS, 0.0, 0.0))
    for number in range(100):
        decision, memory = review(number * REVIEW_S, limits, replace(idle, ready=0), memory)
        assert decision.after == 1
    decisions = run(limits, idle, 120, memory, 500.0)
    assert next(found.at_s for found in decisions if found.after == 0) >= 500.0 + 60 - REVIEW_S
