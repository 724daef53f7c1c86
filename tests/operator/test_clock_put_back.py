"""A wall clock that is put back by hours holds up nothing for hours: neither retries nor the steps of a canary."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker.operator.domain.clock import rest_s, timestamp
from stoker.operator.domain.elastic import Moment, Pace, due_in_s
from stoker.operator.domain.recovery import left_s
from stoker.pod.causes import Cause
from testing.operator.canary_world import CanaryServing
from testing.operator.serving_world import Serving, condition_of
from testing.operator.training_world import JOB, Run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BACK_S = -5 * 3600


@pytest.mark.parametrize(
    ("elapsed_s", "left"), [(0, 10), (4, 6), (10, 0), (99, 0), (-3, 13), (-10, 20), (-11, 0), (BACK_S, 0)]
)
def test_a_wait_is_at_most_twice_as_long_where_clocks_differ(elapsed_s: float, left: float) -> None:
    assert rest_s(NOW, 10, NOW + timedelta(seconds=elapsed_s)) == left


@pytest.mark.parametrize(
    ("elapsed_s", "left"), [(0, 10), (4, 6), (10, 0), (99, 0), (-3, 10), (-10, 10), (-11, 0), (BACK_S, 0)]
)
def test_a_delay_after_the_end_that_another_clock_noted_is_never_longer_than_itself(
    elapsed_s: float, left: float
) -> None:
    assert left_s(NOW, 10, NOW + timedelta(seconds=elapsed_s)) == left


@pytest.mark.parametrize("changes", [{"since": NOW}, {"runs": True, "since": NOW}, {"changed": NOW}])
def test_a_change_of_size_waits_for_no_clock(changes: dict[str, Any]) -> None:
    long_ago = NOW - timedelta(days=1)
    moment = Moment(**{"now": NOW, "workers": 2, "runs": False, "since": long_ago, **changes})
    assert due_in_s(moment, Pace()) > 0
    assert due_in_s(replace(moment, now=NOW + timedelta(seconds=BACK_S)), Pace()) == 0


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


def test_a_router_that_failed_is_replaced() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    for router in serving.cluster.pods("router"):
        serving.cluster.kill(router)
    serving.cluster.advance(BACK_S)
    serving.rest(5)
    assert serving.status["phase"] == "Serving"


def test_a_drain_that_no_engine_ends_has_its_time_from_then_on() -> None:
    serving = Serving(replicas=2)
    serving.begin_drain()
    assert len(serving.engines()) == 2
    serving.cluster.advance(BACK_S)
    for _ in range(2):
        serving.cluster.settle_once()
    serving.cluster.advance(serving.cluster.settings.drain_timeout_s + 1)
    serving.cluster.settle_once()
    serving.cluster.collect()
    assert len(serving.engines()) == 1


def test_a_run_whose_trainer_never_answers_a_suspension_is_stopped() -> None:
    run = Run()
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.update(run={"suspend": True}))
    run.cluster.settle_once()
    assert run.status["phase"] == "Suspending"
    run.cluster.advance(BACK_S)
    run.cluster.settle_once()
    assert all(pod["metadata"].get("deletionTimestamp") for pod in run.gang)


def test_the_deadline_of_a_run_begins_anew() -> None:
    run = Run(run={"activeDeadlineSeconds": 600})
    run.start()
    run.cluster.advance(BACK_S)
    run.cluster.settle()
    assert run.cluster.plan(JOB).requeue_after_s == 600
    assert (run.status["phase"], run.status["startedAt"]) == ("Running", timestamp(run.cluster.now))
    run.cluster.advance(601)
    run.cluster.settle()
    assert (run.status["phase"], run.condition(run.job, "Stalled")) == ("Failed", "True")


@pytest.mark.parametrize("ttl_s", [0, 600])
def test_a_finished_job_is_deleted_after_its_time_from_then_on(ttl_s: int) -> None:
    run = Run(run={"ttlSecondsAfterFinished": 86400})
    run.start()
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED)
    run.cluster.settle()
    run.cluster.advance(BACK_S)
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(ttlSecondsAfterFinished=ttl_s))
    run.cluster.reconcile(JOB)
    assert JOB in run.cluster.objects, "not before its time, however far the clock was put back"
    run.cluster.advance(ttl_s)
    run.cluster.reconcile(JOB)
    assert JOB not in run.cluster.objects


def test_a_rollout_without_progress_has_its_deadline_from_then_on() -> None:
    serving = Serving(rollout={"progressDeadlineSeconds": 60})
    serving.checkpoint(10)
    serving.cluster.settle_once()
    serving.cluster.advance(BACK_S)
    serving.cluster.settle_once()
    serving.cluster.advance(61)
    serving.cluster.settle_once()
    assert condition_of(serving.status, "Stalled")["status"] == "True"
    assert serving.status["message"].startswith("the rollout has made no progress for 60 s")


def test_a_canary_goes_on() -> None:
    serving = CanaryServing()
    serving.started()
    while serving.canary.get("phase") != "Holding":
        serving.round()
    serving.cluster.advance(BACK_S)
    for _ in range(120):
        serving.round()
    assert serving.rollout["phase"] == "Completed"
