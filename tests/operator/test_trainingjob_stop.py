"""The end and the pause of a TrainingJob: completion, suspend, cancel, deadline, time to live."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.pod.causes import Cause
from testing.operator.training_world import JOB, Run


def test_a_completed_job_is_final_and_makes_no_pod_again() -> None:
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
    assert run.condition(run.job, "Ready") == "True"
    for pod in run.cluster.pods("trainer"):
        run.cluster.vanish(pod)
    run.cluster.settle()
    assert run.cluster.pods("trainer") == []
    assert run.cluster.plan(JOB).empty


def test_the_last_steps_of_a_job_that_ends_between_two_reports_are_known() -> None:
    run = Run()
    run.start()
    run.train(60)
    numbers: dict[str, Any] = {"step": 100, "total_steps": 100, "loss": 1.5, "tokens": 6400}
    numbers |= {"save_reasons": {run.folder(100): "final"}}
    for pod in run.gang:
        own = numbers if pod["metadata"]["labels"]["stoker.dev/node-rank"] == "0" else {"step": 7}
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),), result=own)
    run.cluster.settle()
    progress = run.status["progress"]
    assert run.checkpoint(100)["spec"]["source"]["save"]["reason"] == "final"
    assert (run.status["phase"], progress["step"], progress["loss"], progress["tokens"]) == (
        "Completed",
        100,
        "1.5",
        6400,
    )
    assert progress["sources"], "what the end does not say stays as it was reported"


def test_a_finished_job_is_deleted_after_its_time_and_its_checkpoints_stay() -> None:
    run = Run(run={"ttlSecondsAfterFinished": 60})
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, saves=(run.word(100),))
    run.cluster.settle()
    run.cluster.advance(61)
    run.cluster.reconcile(JOB)
    run.cluster.settle()
    assert JOB not in run.cluster.objects
    assert len(run.cluster.of_kind("Checkpoint")) == 1


def test_suspend_drains_through_pod_0_and_resume_goes_on_from_the_last_save() -> None:
    run = Run()
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    assert [(path, body["mode"]) for _, path, body in run.cluster.calls] == [("/drain", "suspend")]
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(30),))
    run.cluster.settle()
    assert (run.status["phase"], run.status["attempt"]["end"]) == ("Suspended", "suspended by the user")
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=False))
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 30
    assert run.status["restarts"] == 0


def test_cancel_saves_and_is_final() -> None:
    run = Run()
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(cancel=True))
    run.cluster.reconcile(JOB)
    assert run.cluster.calls[-1][2]["mode"] == "cancel"
    for pod in run.gang:
        run.cluster.end(pod, Cause.CANCELLED, saves=(run.word(30),))
    run.cluster.settle()
    assert (run.status["phase"], run.status["attempt"]["end"]) == ("Cancelled", "cancelled by the user")
    assert run.status["attempt"]["lastStep"] == 30
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(cancel=False))
    run.cluster.settle()
    assert run.status["phase"] == "Cancelled"


def test_pods_that_ignore_a_drain_are_deleted_after_the_grace_period() -> None:
    run = Run(workers={"replicas": 2, "gracePeriodSeconds": 20})
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    run.cluster.advance(51)
    run.cluster.reconcile(JOB)
    assert all(pod["metadata"].get("deletionTimestamp") for pod in run.gang)


def test_a_deadline_ends_the_job() -> None:
    run = Run(run={"activeDeadlineSeconds": 100})
    run.start()
    run.cluster.advance(101)
    run.cluster.settle()
    assert run.status["phase"] == "Failed"
    assert "activeDeadlineSeconds 100" in run.status["message"]


def test_the_deadline_of_a_suspended_job_comes_in_time_too() -> None:
    run = Run(run={"activeDeadlineSeconds": 100})
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=True))
    run.cluster.advance(50)
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED)
    run.cluster.settle()
    run.cluster.collect()
    run.answer_tasks("list", saves=[])
    assert run.status["phase"] == "Suspended"
    assert run.cluster.plan(JOB).requeue_after_s == 50


@pytest.mark.parametrize(
    "change",
    [{"activeDeadlineSeconds": 100}, {"suspend": True}, {"cancel": True}],
    ids=["deadline", "suspend", "cancel"],
)
def test_a_job_whose_pods_have_all_done_their_part_is_completed_whatever_is_wanted_since(
    change: dict[str, Any],
) -> None:
    """The operator was away, or the edit came at the last moment."""
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(change))
    run.cluster.advance(101)
    run.cluster.settle()
    assert run.status["phase"] == "Completed"


def test_a_job_whose_leader_is_done_needs_no_finished_pod_that_was_removed() -> None:
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    leader, other = run.gang
    run.cluster.end(leader, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.vanish(other)
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
