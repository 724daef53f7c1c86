"""The canary's decision as a pure function: tables of gates, and properties over any history of evidence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.rollout.canary import CanaryPlan, CanaryState, Hand, Step, decide, left_s, window_step
from stoker.operator.domain.rollout.evidence import Evidence, RevisionCounts, read_evidence
from stoker.operator.domain.rollout.gates import ENOUGH, Gate, judge, judge_transfers
from stoker.operator.domain.rollout.headroom import OVERLOAD, carried_percent
from stoker.pod.histogram import Histogram

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAN = CanaryPlan(
    steps=(Step(10, 60, 50), Step(50, 60), Step(100, 30)),
    gates=(Gate("errorRate", max=0.01), Gate("ttftP95Ms", max_ratio=1.2)),
)
FREE = Hand()


def counts(requests: int, errors: int = 0, first_token_s: float = 0.1) -> RevisionCounts:
    found = Histogram()
    if requests:
        found.add(first_token_s, requests)
    return RevisionCounts(requests, errors, found, found, found)


GOOD = Evidence(counts(100), counts(900))


@pytest.mark.parametrize(
    ("gate", "seen", "verdict", "text"),
    [
        (Gate("errorRate", max=0.01), Evidence(counts(100, 1), counts(0)), "Passed", "1.00% is at most 1.00%"),
        (Gate("errorRate", max=0.01), Evidence(counts(100, 2), counts(0)), "Failed", "2.00% is above 1.00%"),
        (Gate("errorRate", max=0.01), Evidence(counts(49, 49), counts(900)), "Waiting", "answers 49 of 50"),
        (Gate("errorRate", max_ratio=2), Evidence(counts(100, 2), counts(100, 1)), "Passed", "against 1.00%"),
        (Gate("errorRate", max_ratio=2), Evidence(counts(100, 1), counts(100)), "Failed", "more than 2 times"),
        (Gate("ttftP95Ms", max_ratio=1.2), Evidence(counts(100), counts(19)), "Waiting", "old revision: 19 of 20"),
        (Gate("ttftP95Ms", max_ratio=1.2), Evidence(counts(100, 0, 0.2), counts(900)), "Failed", "more than 1.2 times"),
        (Gate("ttftP95Ms", max=50), Evidence(counts(100), counts(0)), "Failed", "is above 50.0 ms"),
        (Gate("itlP95Ms", max=200), Evidence(counts(100), counts(0)), "Passed", "is at most 200.0 ms"),
        (Gate("itlP95Ms", max=200, max_ratio=1), Evidence(counts(100), counts(50)), "Passed", "at most 1 times"),
        (Gate("queueP95Ms", max=50), Evidence(counts(100), counts(0)), "Failed", "is above 50.0 ms"),
        (Gate("queueP95Ms", max_ratio=1.2), Evidence(counts(100), counts(100)), "Passed", "at most 1.2 times"),
        (Gate("queueP95Ms", max=50), Evidence(replace(counts(100), queue_s=Histogram()), counts(0)), "Waiting",
         "queued requests 0 of 20"),
        (Gate("ttftP95Ms", max=50), Evidence(replace(counts(100), first_token_s=Histogram()), counts(0)), "Waiting",
         "streams 0 of 20"),
    ],
)  # fmt: skip
def test_a_gate_judges_the_new_revision_on_enough_answers(gate: Gate, seen: Evidence, verdict: str, text: str) -> None:
    result = judge(gate, seen, needed=50)
    assert result.verdict == verdict
    assert text in result.message


@pytest.mark.parametrize(
    ("new", "old", "verdict", "text"),
    [
        ((100, 5), (900, 0), "Passed", "5 of 100 transfers between its pools failed, 0.00% of the old revision"),
        ((100, 6), (900, 0), "Failed", "6 of 100 transfers between its pools failed, 0.00% of the old revision: more"),
        ((100, 6), (900, 36), "Passed", "4.00% of the old revision"),
        ((100, 9), (900, 36), "Failed", "more than 8.00%"),
        ((100, 6), (19, 19), "Failed", "more than 5.00%"),
        ((19, 19), (900, 0), "Passed", "19 of 19"),
        ((0, 0), (0, 0), "Passed", "0 of 0"),
    ],
)
def test_transfers_that_fail_more_often_than_those_of_the_old_revision_fail_the_canary(
    new: tuple[int, int], old: tuple[int, int], verdict: str, text: str
) -> None:
    """Few prove nothing and hold nothing: idle engines never split a request."""
    ours, theirs = (replace(counts(100), splits=splits, failed_splits=failed) for splits, failed in (new, old))
    seen = Evidence(ours, theirs)
    result = judge_transfers(seen)
    assert (result.metric, result.verdict, result.samples) == ("transferErrorRate", verdict, new[0])
    assert text in result.message
    plan = replace(PLAN, gates=(), transfers=True)
    state = CanaryState(phase="Holding", percent=10, since=NOW)
    after = decide(plan, state, seen, ready=True, hand=FREE, now=NOW)
    assert [one.metric for one in after.results] == ["transferErrorRate"]
    assert (after.phase, after.reason) == (("Failed", "GateFailed") if verdict == "Failed" else ("Holding", "Holding"))


def test_a_metric_that_is_not_measured_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"metric latencyP95Ms is not measured; allowed: errorRate"):
        judge(Gate("latencyP95Ms", max=1), GOOD, 1)


def test_the_reports_of_all_routers_add_up_and_missing_ones_are_named() -> None:
    entry = {"requests": 10, "errors": 1, "first_token_s": {"3": 10}, "token_gap_s": {}}
    good = {"window": {"id": "w", "revisions": [{"revision": "new", "pool": "main", **entry}]}}
    seen = read_evidence({"a": good, "b": good}, "w", "new", "old")
    assert (seen.new.requests, seen.new.errors, seen.new.first_token_s.total) == (20, 2, 20)
    assert (seen.old.requests, seen.missing) == (0, ())
    assert seen.new.queue_s.total == 0  # routers of an older version
    pools = [{"revision": "new", "pool": pool, **entry, "queue_s": {"-9": 4}} for pool in ("prefill", "decode")]
    pools[1] |= {"splits": 30, "failed_splits": 3}
    both, late = ({"window": {"id": "w", "revisions": listed}} for listed in (pools, pools[:1]))
    seen = read_evidence({"a": both, "b": late}, "w", "new", "old")
    assert seen.new.queue_s.counts == {-9: 8}  # each router has the times of all: they do not add up
    assert (seen.new.splits, seen.new.failed_splits) == (30, 3)
    bad: dict[str, Any] = {
        "no": None, "old": {}, "late": {"window": {"id": "v", "revisions": []}},
        "odd": {"window": {"id": "w", "revisions": [{"revision": "new"}]}},
    }  # fmt: skip
    assert [line.split()[1] for line in read_evidence(bad, "w", "new", "old").missing] == ["late", "no", "odd", "old"]
    assert read_evidence({}, "w", "new", "old").missing == ("no router is ready",)


def test_a_canary_walks_through_its_steps() -> None:
    state, now, walked = CanaryState(), NOW, []
    for _ in range(40):
        state = decide(PLAN, state, GOOD, ready=True, hand=FREE, now=now)
        walked.append((state.phase, state.percent, window_step(state)))
        now += timedelta(seconds=10)
    assert list(dict.fromkeys(walked)) == [
        ("Holding", 10, 0), ("Waiting", 10, 0), ("Holding", 50, 1), ("Waiting", 50, 1), ("Holding", 100, 2),
        ("Promoted", 100, 1),
    ]  # fmt: skip
    assert left_s(PLAN, state, now) is None


@pytest.mark.parametrize(
    ("seen", "ready", "hand", "reason"),
    [
        (Evidence(), True, FREE, "TooFewRequests"),
        (replace(GOOD, missing=("router a has not reported",)), True, FREE, "MissingData"),
        (GOOD, True, Hand(paused=True), "Paused"),
        (Evidence(counts(100), counts(0)), True, FREE, "TooFewRequests"),
    ],
)
def test_the_share_stays_with_its_reason(seen: Evidence, ready: bool, hand: Hand, reason: str) -> None:
    state = decide(PLAN, CanaryState(), GOOD, ready=True, hand=FREE, now=NOW)
    later = decide(PLAN, state, seen, ready=ready, hand=hand, now=NOW + timedelta(hours=9))
    assert (later.phase, later.percent, later.reason) == ("Holding", 10, reason)


def test_a_comparison_at_the_only_step_of_100_percent_waits_for_a_person() -> None:
    plan = replace(PLAN, steps=(Step(100, 10),))
    state, now = CanaryState(), NOW
    for _ in range(10):
        state = decide(plan, state, Evidence(counts(100), counts(0)), ready=True, hand=FREE, now=now)
        now += timedelta(seconds=60)
    assert (state.phase, state.reason) == ("Holding", "TooFewRequests")
    assert decide(plan, state, GOOD, ready=True, hand=Hand(promote=True), now=now).phase == "Promoted"


COUNTS = st.builds(counts, st.integers(0, 200), st.integers(0, 5), st.sampled_from((0.1, 0.1, 0.1, 0.2)))
SEEN = st.builds(Evidence, COUNTS, COUNTS, st.sampled_from(((), (), ("router a has not reported",))))
HANDS = st.sampled_from((FREE, FREE, FREE, FREE, Hand(paused=True), Hand(abort=True), Hand(promote=True)))
HISTORY = st.lists(st.tuples(SEEN, st.booleans(), HANDS, st.integers(0, 90)), max_size=30)
PLANS = st.builds(
    CanaryPlan,
    st.lists(st.builds(Step, st.integers(1, 100), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4).map(
        tuple
    ),
    st.lists(st.sampled_from(PLAN.gates), unique=True, max_size=2).map(tuple),
)


@given(plan=PLANS, history=HISTORY)
def test_no_share_rises_on_missing_data_or_too_few_requests_and_a_failure_stays(
    plan: CanaryPlan, history: list[tuple[Evidence, bool, Hand, int]]
) -> None:
    state, now = CanaryState(), NOW
    for seen, ready, hand, seconds in history:
        now += timedelta(seconds=seconds)
        before, state = state, decide(plan, state, seen, ready=ready, hand=hand, now=now)
        if hand.promote:
            assert state.phase == "Promoted"
            continue
        if before.phase in ("Failed", "Promoted"):
            assert state == before
            continue
        entered = before.phase == "Holding" and state.phase in ("Waiting", "Promoted")
        if entered:
            step = plan.steps[before.step]
            assert not seen.missing
            assert not hand.paused
            assert seen.new.requests >= plan.needed(step)
            assert before.since is not None
            assert (now - before.since).total_seconds() >= step.hold_s
            assert all(result.verdict == "Passed" for result in state.results)
            assert len(state.results) == len(plan.gates)
        if before.phase == "Waiting" and state.phase == "Holding":
            assert ready
            assert not hand.paused
        if state.percent > before.percent:
            assert entered or (before.phase == "Waiting" and ready)
        failed = window_step(before) is not None and any(
            judge(gate, seen, plan.needed(plan.steps[window_step(before) or 0])).verdict == "Failed"
            for gate in plan.gates
        )
        if failed or hand.abort:
            assert (state.phase, state.percent) == ("Failed", 0)
        for result in state.results:
            assert result.verdict == "Waiting" or result.samples >= min(ENOUGH, plan.needed(plan.steps[before.step]))


@given(pools=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3))
def test_no_replica_of_the_old_revision_is_given_more_than_twice_its_part(pools: list[tuple[int, int]]) -> None:
    carried = carried_percent(pools)
    assert 0 <= carried <= 100
    wanting = [(ready, wanted) for ready, wanted in pools if wanted]
    assert all(carried * wanted <= 100 * OVERLOAD * ready for ready, wanted in wanting)
    assert carried == 100 or any(OVERLOAD * ready < wanted for ready, wanted in wanting)


@given(plan=PLANS, history=HISTORY, carried=st.lists(st.integers(0, 100), min_size=30, max_size=30))
def test_a_failed_share_never_rises_and_only_what_the_old_revision_cannot_take_is_left_of_it(
    plan: CanaryPlan, history: list[tuple[Evidence, bool, Hand, int]], carried: list[int]
) -> None:
    state, now = CanaryState(), NOW
    for (seen, ready, hand, seconds), room in zip(history, carried, strict=False):
        now += timedelta(seconds=seconds)
        before, state = state, decide(plan, state, seen, ready=ready, hand=hand, now=now, carried=room)
        if state.phase != "Failed":
            assert before.phase != "Failed" or hand.promote
            continue
        wrong = state.message.startswith("errorRate") or hand.abort or before.percent == 0
        assert state.percent <= min(before.percent, 100 - room)
        assert state.percent == (0 if wrong else min(before.percent, 100 - room))


def test_wrong_answers_count_before_slow_ones() -> None:
    plan = replace(PLAN, steps=(Step(100, 60),), gates=(Gate("ttftP95Ms", max=50), Gate("errorRate", max=0.01)))
    state = CanaryState(percent=100, phase="Holding", since=NOW)
    seen = Evidence(counts(100, 50), counts(0))
    failed = decide(plan, state, seen, ready=True, hand=FREE, now=NOW, carried=10)
    assert (failed.percent, failed.message.split()[0]) == (0, "errorRate")
