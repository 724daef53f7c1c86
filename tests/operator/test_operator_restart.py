"""An operator that has just started has polled no pod: the status before stays until a pod reports."""

from __future__ import annotations

from testing.operator.serving_world import Serving
from testing.operator.training_world import Run


def test_a_running_job_stays_running() -> None:
    run = Run()
    run.start()
    run.train(12)
    before = run.status
    assert before["phase"] == "Running"
    run.cluster.reports.clear()
    run.cluster.settle_once()
    assert run.status == before


def test_a_job_whose_workers_never_spoke_is_starting() -> None:
    run = Run()
    run.cluster.settle()
    for pod in run.gang:
        run.cluster.run(pod)
    run.cluster.settle()
    assert run.status["phase"] == "Starting"
    assert run.status["message"] == "the workers start"


def test_engines_that_serve_stay_serving() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    before = serving.status, serving.pool_status
    serving.cluster.reports.clear()
    serving.cluster.settle_once()
    assert (serving.status, serving.pool_status) == before
