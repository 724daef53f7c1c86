"""The autoscaler against the engine's real scheduler in virtual time: its prediction, and a pool on a changing load."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.operator.domain.autoscaling.decision import Limits
from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals, predict
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram
from stoker.router.request_class import RequestClass
from testing.clocked.fleet import FleetSettings, simulate, smallest_static
from testing.clocked.replica import EngineSettings, Served
from testing.clocked.trace import TracedRequest, multiplied, read_trace, repeated

CURVE = StepCurve(base_s=0.06, prompt_token_s=6e-4, decode_token_s=1e-3)
ENGINE = EngineSettings(CURVE, kv_tokens=200_000, max_requests=64, prefix_cache=False, mixed_tokens=None)
SETTINGS = FleetSettings(ENGINE, startup_s=60.0)


def poisson(rates: list[tuple[float, float]], seed: int = 0) -> list[TracedRequest]:
    """Requests with (seconds, requests/s) in turn; prompts of 200 to 1,600 tokens, 16 answered."""
    chance, made, begin_s = random.Random(seed), list[TracedRequest](), 0.0
    for seconds, rate in rates:
        now_s = begin_s + chance.expovariate(rate)
        while now_s < begin_s + seconds:
            made.append(TracedRequest(len(made), now_s, chance.randint(200, 1600), 16))
            now_s += chance.expovariate(rate)
        begin_s += seconds
    return made


def first_token_p95(served: list[Served]) -> float:
    ordered = sorted(found.first_token_s for found in served)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


@pytest.mark.parametrize(("rate", "replicas"), [(0.3, 1), (0.9, 1), (2.4, 2)])
def test_the_predicted_first_token_is_that_of_the_scheduler(rate: float, replicas: int) -> None:
    requests = poisson([(700, rate)])
    prompts = Histogram()
    for request in requests:
        prompts.add(request.prompt)
    demand = Demand(rate, 1.0, prompts, prompts.moment(), 16)
    shape = EngineShape(ENGINE.kv_tokens, ENGINE.max_requests, ENGINE.max_batch_tokens)
    predicted = predict(demand, CURVE, shape, replicas).first_token_s
    found = first_token_p95(simulate(replace(SETTINGS, replicas=replicas), requests).served)
    assert found / 2 < predicted < found * 2


def test_a_pool_follows_its_load_and_costs_less_than_the_smallest_static_one() -> None:
    requests = poisson([(500, 0.6), (150, 1.0), (150, 1.7), (150, 2.6), (400, 3.6), (1400, 0.6)])
    goals = Goals(first_token_s=5.0)
    static, whole = smallest_static(SETTINGS, requests, goals, 0.95, begin=2)
    limits = Limits(1, 16, goals=goals, scale_down_after_s=120)
    scaled = simulate(replace(SETTINGS, replicas=2, limits=limits), requests)
    assert scaled.attained(goals) >= 0.95
    assert scaled.replica_s < whole.replica_s
    assert scaled.most >= static
    assert scaled.most_turns() <= 1
    assert len(scaled.served) == len({found.request.number for found in scaled.served}) == len(requests)


def test_a_pool_that_meets_its_goals_at_a_constant_rate_is_left_alone() -> None:
    """By prediction alone chance adds a replica at 315 s, and again later."""
    goals = Goals(first_token_s=1.45)
    limits = Limits(2, 16, goals=goals, scale_down_after_s=120)
    scaled = simulate(replace(SETTINGS, replicas=2, limits=limits), poisson([(1500, 1.0)], seed=1))
    assert scaled.decisions == []
    assert scaled.attained(goals) >= 0.97


def test_a_pool_without_engines_holds_requests_until_it_wakes() -> None:
    limits = Limits(0, 4, goals=Goals(first_token_s=5.0), scale_down_after_s=60)
    requests = poisson([(60, 0.5)])
    late = [*requests, replace(requests[-1], number=len(requests), at_s=600.0)]
    result = simulate(replace(SETTINGS, replicas=1, limits=limits), late)
    assert [found.after for found in result.decisions][-2:] == [0, 1]
    assert result.decisions[-1].reason == "Wake"
    assert 60 <= result.served[-1].first_token_s <= 60 + 10


def test_beyond_capacity_a_goal_at_the_router_keeps_most_requests_within_it() -> None:
    """Without one all that come are late after a while; with one the router refuses a part, and the rest is in time."""
    requests, goals = poisson([(300, 4.0)], seed=2), Goals(first_token_s=5.0)
    overloaded = replace(SETTINGS, replicas=2, policy="cacheAware")
    late = simulate(overloaded, requests)
    refusing = simulate(replace(overloaded, classes=(RequestClass(name="all", ttft_goal_s=5.0),)), requests)
    answered = [found for found in refusing.served if found.first_s is not None]
    assert len(refusing.served) == len(late.served) == len(requests)
    assert len(answered) < len(requests)
    assert sum(found.meets(goals) for found in answered) > 0.95 * len(answered)
    assert refusing.attained(goals) > late.attained(goals) + 0.2


def test_in_a_burst_requests_that_are_late_anyway_wait_behind_those_that_can_be_in_time() -> None:
    """A pool that just keeps up, with a burst of 20 s: bound on arrival all that come for minutes are late."""
    requests, goals = poisson([(60, 1.5), (20, 8.0), (220, 1.5)], seed=5), Goals(first_token_s=5.0)
    pool = replace(SETTINGS, replicas=2)
    bound = simulate(pool, requests)
    classes = (
        RequestClass(name="all", ttft_goal_s=4.0, late_class="late"),
        RequestClass(name="late", max_queue_s=600, max_queued=1000),
    )
    behind = simulate(replace(pool, classes=classes), requests)
    assert len(behind.served) == len({found.request.number for found in behind.served}) == len(requests)
    assert all(found.tokens == found.request.output for found in behind.served), "none is refused"
    assert behind.attained(goals) > bound.attained(goals) + 0.1


def test_conversations_find_their_beginnings_where_the_router_weighs_them() -> None:
    """Six conversations of six turns, each turn 512 tokens longer; three engines with a prefix cache."""
    turns = [
        TracedRequest(0, 12.0 * turn + talk, 512 * (turn + 1) + 8, 8, tuple(range(100 * talk, 100 * talk + turn + 2)))
        for turn in range(6)
        for talk in range(6)
    ]
    requests = [replace(found, number=number) for number, found in enumerate(turns)]
    assert requests[6].chain()[:2] == requests[0].chain()
    assert len(requests[6].chain()) == 4
    settings = replace(SETTINGS, engine=replace(ENGINE, prefix_cache=True), replicas=3)
    computed = {
        policy: sum(found.uncached for found in simulate(replace(settings, policy=policy), requests).served)
        for policy in ("cacheAware", "random")
    }
    assert computed["cacheAware"] <= 36 * 600
    assert computed["cacheAware"] < 0.7 * computed["random"]


def test_both_forms_of_traces_are_read_and_changed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,3,0\n"
    )
    (tmp_path / "b.jsonl").write_text(
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'
        '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [7]}\n'
    )
    azure, mooncake = read_trace(tmp_path / "a.csv"), read_trace(tmp_path / "b.jsonl")
    assert [(found.at_s, found.prompt, found.output) for found in azure] == [(0.0, 4808, 10), (2.0, 3, 1)]
    assert [found.at_s for found in mooncake] == [0.0, 3.0]
    assert mooncake[0].tokens() == mooncake[1].tokens()[:512]
    assert len(mooncake[1].tokens()) == 600
    assert azure[0].tokens()[0] != azure[1].tokens()[0]
    assert len(multiplied(azure, 3, 1.0)) == 6
    day = repeated(azure, 100.0, lambda at_s: 0.5 if at_s < 50 else 0.0)
    assert 10 < len(day) < 50
    assert max(found.at_s for found in day) < 50
