"""Data ranks as choices of their own against a pod that is one choice: engines in virtual time, real scheduler.

Nothing depends on the machine: times are those of the steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.router.request_class import RequestClass
from testing.clocked.fleet import FleetResult, FleetSettings, simulate
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import conversations

CURVE = StepCurve(base_s=0.015, prompt_token_s=8e-5, decode_token_s=1e-4)
ENGINE = EngineSettings(CURVE, kv_tokens=400_000)
SETTINGS = FleetSettings(ENGINE, replicas=4, policy="cacheAware")
TALKS = conversations(24, 5, rate=6.0)
GOAL_S = 1.0


def computed_share(result: FleetResult) -> float:
    """Prompt tokens that were computed, of all: the rest was in the cache of the rank that got the request."""
    served = [found for found in result.served if found.first_s is not None]
    return sum(found.uncached for found in served) / sum(found.request.prompt for found in served)


def mean_first_token_s(result: FleetResult) -> float:
    return sum(found.first_token_s for found in result.served) / len(result.served)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_conversation_finds_its_beginning_at_the_rank_that_is_named(ranks: int) -> None:
    named, as_one = (simulate(replace(SETTINGS, ranks_as_one=count), TALKS) for count in (1, ranks))
    assert computed_share(named) < 0.8 * computed_share(as_one)
    assert mean_first_token_s(named) < 0.8 * mean_first_token_s(as_one)


def test_requests_that_are_admitted_for_a_rank_are_in_time() -> None:
    settings = replace(SETTINGS, classes=(RequestClass(name="all", ttft_goal_s=GOAL_S),))
    named, as_one = (simulate(replace(settings, ranks_as_one=count), TALKS).served for count in (1, 4))
    late = [
        [one for one in served if one.first_s is not None and one.first_token_s > GOAL_S] for served in (named, as_one)
    ]
    assert len(late[0]) < 0.1 * len(late[1]), "nearly all late ones are those of four queues taken for one"
