"""A prefill and a decode pool of the engine's real scheduler in virtual time, under the autoscaler."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stoker.operator.domain.autoscaling.decision import Limits
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from testing.clocked.pair_fleet import PairResult, PairSettings, simulate_pair
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import TracedRequest

CURVE = StepCurve(base_s=0.06, prompt_token_s=6e-4, decode_token_s=1e-3)
ENGINE = EngineSettings(CURVE, kv_tokens=200_000, max_requests=64, mixed_tokens=256)
PREFILL, DECODE = Limits(1, 6, goals=Goals(first_token_s=3.0)), Limits(1, 6, goals=Goals(gap_s=0.3))


def poisson(seconds: float, rate: float, output: int = 24) -> list[TracedRequest]:
    """Requests with prompts of 200 to 1,600 tokens."""
    chance, made, now_s = random.Random(1), list[TracedRequest](), 0.0
    while (now_s := now_s + chance.expovariate(rate)) < seconds:
        made.append(TracedRequest(len(made), now_s, chance.randint(200, 1600), output))
    return made


def grown(result: PairResult, pool: str) -> int:
    """The most replicas that a pool was given."""
    return max((found.after for role, found in result.decisions if role == pool), default=0)


def test_every_request_is_answered_once_and_whole_and_long_prompts_are_split_under_load() -> None:
    requests = poisson(120, 1.2)
    result = simulate_pair(PairSettings(ENGINE, (1, 2)), requests)
    assert sorted(found.request.number for found in result.served) == [found.number for found in requests]
    assert {found.tokens for found in result.served} == {24}
    assert 0 < result.splits < len(requests), "an idle decode engine computes prompts itself"


def test_a_prefill_pool_grows_for_prompts_that_only_decode_engines_asked_for() -> None:
    """Before its engines reported them, it kept its size for ever."""
    settings = PairSettings(ENGINE, (1, 2), (PREFILL, replace(DECODE, max=2)), startup_s=30.0, flips=False)
    result = simulate_pair(settings, poisson(300, 2.4))
    assert grown(result, "prefill") > 1
    fixed = simulate_pair(replace(settings, limits=None), poisson(300, 2.4))
    assert result.attained(Goals(3.0)) > fixed.attained(Goals(3.0))


@pytest.mark.parametrize("gpus", [4, 5])
def test_two_pools_never_have_more_than_the_nodes(gpus: int) -> None:
    limits = replace(PREFILL, scale_down_after_s=60), replace(DECODE, scale_down_after_s=60)
    settings = PairSettings(ENGINE, (1, 2), limits, gpus=gpus, startup_s=30.0)
    result = simulate_pair(settings, poisson(300, 2.6))
    sizes, most = {"prefill": 1, "decode": 2}, 3
    for role, found in result.decisions:
        sizes[role] = found.after
        most = max(most, sum(sizes.values()))
    assert gpus <= most <= gpus + 2, "one asks for a node, and a flip is told by one pool after the other"
    assert all(result.most_turns(role) <= 1 for role in ("prefill", "decode"))
