"""`run.applyChanges: Restart`: an edit of a running job saves, restarts it in the new form and counts as no failure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.pod.causes import Cause
from testing.operator.training_world import EVENTS, JOB, Run, disturb
from testing.operator.unbuilt import UNBUILT

RESTART: dict[str, Any] = {"run": {"applyChanges": "Restart"}}


def edit(run: Run, seconds: int = 700) -> None:
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("deadlines", {}).update(stepSeconds=seconds))


def rendered_seconds(run: Run) -> int:
    return int(run.status["pinned"]["rendered"]["config"]["deadlines"]["step_s"])


def pending(run: Run) -> dict[str, Any] | None:
    return next((found for found in run.status["conditions"] if found["type"] == "EditPending"), None)


def test_an_edit_saves_and_restarts_in_the_new_form_without_a_failure() -> None:
    run = Run(**RESTART)
    run.start()
    run.train(30, (run.save(20),))
    edit(run)
    run.cluster.reconcile(JOB)
    run.cluster.reconcile(JOB)
    drains = [body for _, path, body in run.cluster.calls if path == "/drain"]
    assert {(body["id"], body["mode"]) for body in drains} == {(f"{run.job['metadata']['uid']}-restart-0", "suspend")}
    assert run.status["phase"] == "Restarting"
    assert run.status["message"] == "attempt 0 saves and restarts with spec.deadlines.stepSeconds 600 -> 700"
    condition = pending(run)
    assert condition is not None
    assert condition["reason"] == "Restart"
    assert condition["message"] == "the run saves and restarts with spec.deadlines.stepSeconds 600 -> 700"
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(20), run.word(30)))
    run.next_attempt()
    assert (run.attempt, rendered_seconds(run)) == (1, 700)
    assert run.status["attempt"]["resumedFrom"]["step"] == 30
    assert [run.status.get(name, 0) for name in ("restarts", "failuresWithoutProgress", "lostSteps")] == [0, 0, 0]
    assert "failure" not in run.status["attempts"][0]
    assert run.status["attempts"][0]["end"] == "restarts with spec.deadlines.stepSeconds 600 -> 700"
    assert run.status["attempts"][0]["lastStep"] == 30
    assert pending(run) is None
    assert [event for event in run.cluster.events if "RestartForEdit" in event]


def test_without_it_an_edit_waits_and_controls_never_restart() -> None:
    run = Run()
    run.start()
    edit(run)
    run.cluster.settle()
    condition = pending(run)
    assert condition is not None
    assert condition["reason"] == "NextAttempt"
    assert run.cluster.calls == []
    other = Run(**RESTART)
    other.start()
    other.cluster.change_spec(JOB, lambda spec: spec["run"].update(backoffLimit=3))
    other.cluster.change_spec(JOB, lambda spec: spec["checkpoint"].update(maxToKeep=3))
    other.cluster.settle()
    assert other.cluster.calls == []
    assert other.cluster.plan(JOB).empty


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"topology": [{"key": "rack", "mode": "Required"}]}, "spec.scheduling.topology"),
        ({"backend": "auto"}, "spec.scheduling.backend"),
    ],
)
def test_an_edit_of_the_placement_of_a_gang_that_runs_waits_or_restarts_it_once(
    changes: dict[str, Any], shown: str
) -> None:
    run = Run()
    run.start()
    run.train(30, (run.save(30),))
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("scheduling", {}).update(changes))
    run.cluster.settle()
    condition = pending(run)
    assert condition is not None
    assert (condition["reason"], run.attempt) == ("NextAttempt", 0)
    assert shown in condition["message"]
    run.cluster.change_spec(JOB, lambda spec: spec.update(RESTART))
    run.cluster.reconcile(JOB)
    assert run.status["phase"] == "Restarting"
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(30),))
    run.next_attempt()
    run.train(31)
    assert (run.attempt, pending(run)) == (1, None)
    assert run.cluster.plan(JOB).empty


def test_the_limit_for_the_start_of_a_gang_is_edited_at_once() -> None:
    run = Run(**RESTART)
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("scheduling", {}).update(gangTimeoutSeconds=90))
    run.cluster.settle()
    assert (run.cluster.calls, pending(run)) == ([], None)


def test_a_gang_that_never_ran_is_made_anew_and_a_refused_edit_restarts_nothing() -> None:
    run = Run(**RESTART)
    run.cluster.settle()
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(replicas=1))
    run.next_attempt()
    assert (run.attempt, len(run.gang), run.cluster.calls) == (1, 1, [])
    run.train(1)
    run.cluster.change_spec(JOB, lambda spec: spec.update(UNBUILT))
    run.cluster.settle()
    assert (run.attempt, run.cluster.calls) == (1, [])
    assert run.condition(run.job, "EditRefused") == "True"


def test_another_image_replaces_one_that_cannot_be_pulled() -> None:
    run = Run(workers={"replicas": 2, "image": "registry.example.com/tpyo:1"})
    run.cluster.settle()
    for pod in run.gang:
        waiting = {"reason": "ImagePullBackOff", "message": "not found"}
        pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "main", "state": {"waiting": waiting}}]}
        run.cluster._touch(pod)
    run.cluster.settle()
    assert run.condition(run.job, "Stalled") == "True"
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(image="registry.example.com/typo:1"))
    run.next_attempt()
    assert run.attempt == 1
    assert {pod["spec"]["containers"][0]["image"] for pod in run.gang} == {"registry.example.com/typo:1"}
    assert run.status.get("failuresWithoutProgress", 0) == 0


def test_pods_that_ignore_the_drain_are_deleted_and_a_second_edit_comes_along() -> None:
    run = Run(workers={"replicas": 2, "gracePeriodSeconds": 20}, **RESTART)
    run.start()
    edit(run)
    run.cluster.reconcile(JOB)
    edit(run, 800)
    run.cluster.advance(51)
    run.cluster.settle()
    assert all(pod["metadata"].get("deletionTimestamp") for pod in run.gang)
    run.next_attempt()
    assert (run.attempt, rendered_seconds(run)) == (1, 800)


@pytest.mark.parametrize(("cause", "phase"), [(Cause.COMPLETED, "Completed"), (Cause.CONFIG_INVALID, "Failed")])
def test_an_end_before_the_edit_counts_as_what_it_is(cause: Cause, phase: str) -> None:
    run = Run(**RESTART)
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, cause, saves=(run.word(100),))
    edit(run)
    run.cluster.settle()
    assert run.status["phase"] == phase
    assert run.attempt == 0


@pytest.mark.parametrize(("control", "phase"), [("suspend", "Suspended"), ("cancel", "Cancelled")])
def test_a_stop_is_stronger_than_a_restart(control: str, phase: str) -> None:
    run = Run(**RESTART)
    run.start()
    edit(run)
    run.cluster.reconcile(JOB)
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update({control: True}))
    run.cluster.reconcile(JOB)
    assert [body["mode"] for _, _, body in run.cluster.calls] == ["suspend", control]
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(30),))
    run.cluster.settle()
    assert (run.status["phase"], run.attempt) == (phase, 0)


def test_an_edit_that_is_taken_back_while_the_run_saves_restarts_it_as_it_was() -> None:
    run = Run(**RESTART)
    run.start()
    edit(run)
    run.cluster.reconcile(JOB)
    edit(run, 600)
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(30),))
    run.next_attempt()
    assert (run.attempt, rendered_seconds(run)) == (1, 600)
    assert run.status["attempt"]["resumedFrom"]["step"] == 30


HARMLESS = ("job", "checkpoints", "run", "train", "save", "tasks", "collect", "wait", "edit", "drained")


def happen(run: Run, event: str, number: int) -> None:
    """One event; a pod that was asked to drain saves where it is and ends."""
    if event == "edit":
        edit(run, 600 + number)
        return
    if event != "drained":
        disturb(run, event, number)
        return
    if not any(
        body["id"].endswith(f"-restart-{run.status.get('attempt', {}).get('number')}") for _, _, body in calls(run)
    ):
        return
    for pod in run.gang:
        if pod["status"]["phase"] == "Running":
            step = run.cluster.reports.get(pod["metadata"]["uid"], {}).get("step", 0)
            run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(step),) if step else ())


def calls(run: Run) -> list[tuple[str, str, dict[str, Any]]]:
    return [call for call in run.cluster.calls if call[1] == "/drain"]


def finish(run: Run) -> None:
    """Let everything work: the drain that was asked for, the tasks, and every attempt to its end."""
    for _ in range(40):
        run.cluster.reconcile(JOB)
        happen(run, "drained", 0)
        run.cluster.settle()
        if run.status["phase"] in {"Completed", "Failed"}:
            return
        run.cluster.collect()
        run.cluster.advance(400)
        disturb(run, "tasks", 0)
        for pod in run.gang if "attempt" in run.status else []:
            run.cluster.run(pod)
        run.cluster.reconcile(JOB)
        happen(run, "drained", 0)
        run.cluster.settle()
        gang = run.gang if "attempt" in run.status else []
        idle = run.status["phase"] not in {"Restarting"} and len(gang) == 2
        if idle and all(pod["status"]["phase"] in {"Running", "Succeeded"} for pod in gang):
            for pod in gang:
                if pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp"):
                    run.cluster.end(pod, Cause.COMPLETED)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(st.tuples(st.sampled_from(HARMLESS), st.integers(0, 6)), max_size=40), started=st.booleans())
def test_any_order_of_edits_and_crashes_converges_in_the_newest_form(
    events: list[tuple[str, int]], started: bool
) -> None:
    run = Run(run={"applyChanges": "Restart", "backoffLimit": 0})
    if started:
        run.start()
    resumed = 0
    for event, number in events:
        happen(run, event, number)
        attempt = run.status.get("attempt") or {}
        step = (attempt.get("resumedFrom") or {}).get("step", 0)
        assert step >= resumed, "a restart never goes back behind what was resumed before"
        resumed = step
    finish(run)
    disturb(run, "tasks", 0)
    run.cluster.collect()
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
    assert rendered_seconds(run) == run.job["spec"].get("deadlines", {}).get("stepSeconds", 600)
    assert run.status.get("failuresWithoutProgress", 0) == 0
    assert run.status.get("restarts", 0) == 0
    writes = run.cluster.writes
    run.cluster.settle()
    assert run.cluster.writes == writes, "a second pass over a converged cluster writes nothing"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS, edits=st.lists(st.integers(0, 39), max_size=4))
def test_edits_among_failures_lose_no_verified_save(events: list[tuple[str, int]], edits: list[int]) -> None:
    run = Run(run={"applyChanges": "Restart", "backoffLimit": 1000})
    run.start()
    for number, (event, point) in enumerate(events):
        if number in edits:
            edit(run, 600 + number)
        before = run.status
        disturb(run, event, point)
        after = run.status
        live = [pod for pod in run.cluster.pods("trainer") if pod["status"]["phase"] in {"Pending", "Running"}]
        assert len({pod["metadata"]["labels"]["stoker.dev/attempt"] for pod in live}) <= 1, "one attempt at a time"
        if before.get("attempt", {}).get("number") != after.get("attempt", {}).get("number"):
            rejected = (after.get("resumption") or {}).get("rejected", [])
            steps = [
                found["status"]["step"]
                for found in run.cluster.of_kind("Checkpoint")
                if found.get("status", {}).get("verified") and found["status"]["folder"] not in rejected
            ]
            resumed = (after["attempt"].get("resumedFrom") or {}).get("step", 0)
            assert resumed == max(steps, default=0)


def test_an_edit_of_a_job_that_has_ended_says_that_it_has_no_effect() -> None:
    run = Run(**RESTART)
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(cancel=True))
    run.cluster.reconcile(JOB)
    for pod in run.gang:
        run.cluster.end(pod, Cause.CANCELLED, saves=(run.word(30),))
    run.cluster.settle()
    assert pending(run) is None
    edit(run)
    run.cluster.settle()
    condition = pending(run)
    assert condition is not None
    assert (condition["reason"], run.status["phase"]) == ("Ended", "Cancelled")
    assert condition["message"].endswith("spec.deadlines.stepSeconds 600 -> 700")
    assert run.cluster.plan(JOB).empty
