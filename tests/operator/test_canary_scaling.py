"""A pool that is scaled by its load while a canary goes on: bounds, shares, rest and the way to zero and back."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.operator.canary_world import Quality
from testing.operator.scaled_canary import ScaledCanary

STEPS = [{"percent": 20, "holdSeconds": 40}, {"percent": 50, "holdSeconds": 40}, {"percent": 100, "holdSeconds": 20}]
GATES = [{"metric": "errorRate", "max": "0.02"}]
MODES: list[dict[str, Any]] = [
    {"mode": "load", "scaleDownAfterSeconds": 30},
    {"mode": "slo", "ttftMs": 1000, "scaleDownAfterSeconds": 30},
]


def scaled(mode: dict[str, Any], least: int, most: int, **more: Any) -> ScaledCanary:
    """A pool that serves a first revision, with a second one offered."""
    canary = {"steps": STEPS, "metricGates": GATES}
    serving = ScaledCanary({"min": least, "max": most, **mode}, canary=canary, **more)
    serving.offer(2.0)
    serving.checkpoint(10)
    for _ in range(10):
        serving.round()
    assert serving.status["phase"] == "Serving", serving.status
    serving.checkpoint(20)
    return serving


def turns(sizes: list[int]) -> int:
    """Changes of direction in a series of numbers of replicas."""
    moves = [after > before for before, after in itertools.pairwise(sizes) if after != before]
    return sum(one != other for one, other in itertools.pairwise(moves))


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(MODES),
    least=st.integers(0, 2),
    most=st.integers(2, 6),
    surge=st.integers(0, 2),
    loads=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 4.0, 12.0, 40.0]), st.integers(3, 25)), max_size=4),
    errors=st.booleans(),
)
def test_bounds_and_shares_hold_for_the_sum_and_held_requests_wake_the_pool(
    mode: dict[str, Any], least: int, most: int, surge: int, loads: list[tuple[float, int]], errors: bool
) -> None:
    serving = scaled(mode, least, most, surge=surge)
    old = str(serving.status["currentRevision"])
    for number, (rate, count) in enumerate(loads):
        serving.offer(rate)
        if errors and number == 1 and serving.rollout["toRevision"] != old:
            serving.quality[str(serving.rollout["toRevision"])] = Quality(error_percent=50)
        for _ in range(count):
            held, before = serving.held, serving.replicas
            serving.round()
            assert least <= serving.replicas <= most
            assert len(serving.serving_engines()) <= most + max(surge, 1)
            assert not held or serving.replicas >= min(before, 1), "a pool whose routers hold requests goes not to zero"
    serving.offer(3.0)
    for _ in range(100):
        serving.round()
    assert serving.held == 0
    assert turns(serving.sizes[-70:]) <= 1, "a constant load is no reason to swing"
    assert serving.rollout["phase"] in ("Completed", "RolledBack")
    assert len(serving.serving_engines(str(serving.status["currentRevision"]))) == serving.replicas


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(mode=st.sampled_from(MODES), rates=st.lists(st.sampled_from([0.5, 4.0, 12.0, 25.0]), min_size=1, max_size=4))
def test_the_new_revision_has_the_replicas_of_its_share_whatever_the_size(
    mode: dict[str, Any], rates: list[float]
) -> None:
    serving = scaled(mode, 1, 6)
    for rate in rates:
        serving.offer(rate)
        for _ in range(20):
            serving.round()
            canary, before = serving.canary, serving.sizes[-2]
            if canary.get("phase") != "Holding" or serving.replicas != before or len(set(serving.sizes[-6:])) > 1:
                continue
            new = len(serving.serving_engines(str(serving.rollout["toRevision"])))
            wanted = serving.replicas * min(int(canary["percent"]), 99) / 100
            assert abs(new - max(wanted, 1)) < 1, (new, canary, serving.replicas)


def test_a_canary_goes_to_zero_with_its_pool_and_both_revisions_come_back_for_a_held_request() -> None:
    serving = scaled(MODES[0], 0, 4)
    while serving.canary.get("percent") != 20:
        serving.round()
    old, new = str(serving.status["currentRevision"]), str(serving.rollout["toRevision"])
    serving.offer(0.0)
    while serving.engines():
        serving.round()
    assert (serving.replicas, serving.canary["percent"], serving.canary["phase"]) == (0, 20, "Holding")
    serving.offer(1.0)
    for _ in range(6):
        serving.round()
    assert (serving.replicas, serving.held) == (1, 0)
    assert [len(serving.serving_engines(name)) for name in (old, new)] == [1, 1]


def test_the_second_engine_of_a_canary_proves_nothing_about_the_one_replica_that_stays() -> None:
    serving = scaled(MODES[1], 1, 1, replicas=1)
    serving.offer(4.0)
    while serving.canary.get("phase") != "Holding":
        serving.round()
    for _ in range(10):
        serving.round()
    assert (serving.replicas, len(serving.serving_engines()), serving.canary["percent"]) == (1, 2, 20)
    seen = next(found for _, _, found, _ in serving.watch.inputs())
    assert (seen.replicas, seen.ready, seen.evidence.first_token_s.total) == (1, 2, 0)
    for _ in range(120):
        serving.round()
    assert (serving.rollout["phase"], len(serving.engines())) == ("Completed", 1)
    seen = next(found for _, _, found, _ in serving.watch.inputs())
    assert seen.evidence.first_token_s.total > 0, "alone it shows what it can do"
