"""A wall clock that is put back by hours holds up nothing for hours: neither retries nor the steps of a canary."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stoker.operator.domain.clock import rest_s
from stoker.pod.causes import Cause
from testing.operator.canary_world import CanaryServing
from testing.operator.serving_world import Serving
from testing.operator.training_world import Run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BACK_S = -5 * 3600


@pytest.mark.parametrize(
    ("elapsed_s", "left_s"), [(0, 10), (4, 6), (10, 0), (99, 0), (-3, 13), (-10, 20), (-11, 0), (BACK_S, 0)]
)
def test_a_wait_is_at_most_twice_as_long_where_clocks_differ(elapsed_s: float, left_s: float) -> None:
    assert rest_s(NOW, 10, NOW + timedelta(seconds=elapsed_s)) == left_s


def test_a_job_that_failed_is_started_again() -> None:
    run = Run()
    run.start()
    for pod in run.gang:
        run.cluster.end(pod, Cause.RANK_FAILED)
    run.cluster.settle()
    run.cluster.collect()
    run.cluster.advance(BACK_S)
    run.cluster.settle()
    run.answer_tasks("list", saves=[])
    run.cluster.advance(60)
    run.cluster.settle()
    assert run.attempt == 1


def test_an_engine_that_failed_is_replaced() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    (engine,) = serving.engines()
    serving.cluster.kill(engine)
    serving.cluster.settle_once()
    serving.cluster.advance(BACK_S)
    serving.rest(5)
    assert serving.status["phase"] == "Serving"


def test_a_canary_goes_on() -> None:
    serving = CanaryServing()
    serving.started()
    while serving.canary.get("phase") != "Holding":
        serving.round()
    serving.cluster.advance(BACK_S)
    for _ in range(120):
        serving.round()
    assert serving.rollout["phase"] == "Completed"
