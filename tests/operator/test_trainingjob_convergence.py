"""TrainingJob and Checkpoint converge after any order of events and any crash point."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from stoker.pod.causes import Cause
from testing.operator.training_world import EVENTS, JOB, Run, disturb


def check_invariants(run: Run) -> None:
    live = [p for p in run.cluster.pods("trainer") if p["status"]["phase"] in {"Pending", "Running"}]
    wanted = [p for p in live if not p["metadata"].get("deletionTimestamp")]
    attempts = {p["metadata"]["labels"]["stoker.dev/attempt"] for p in live}
    assert len(attempts) <= 1, "two attempts at the same time"
    if run.status.get("phase") in {"Completed", "Failed", "Cancelled"} and run.cluster.plan(JOB).create:
        kinds = {body["kind"] for body in run.cluster.plan(JOB).create}
        assert kinds <= {"Checkpoint"}, "a terminal job makes no workload"
    resumed = run.status.get("attempt", {}).get("resumedFrom")
    assert resumed is None or resumed["verified"], "only verified checkpoints are resumed"
    assert len(wanted) <= 2


def behave(run: Run) -> None:
    """Let everything work from here on: the job must come to an end."""
    cluster = run.cluster
    cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=False))
    for _ in range(40):
        cluster.settle()
        if run.status["phase"] in {"Completed", "Failed", "Cancelled"}:
            break
        cluster.collect()
        cluster.advance(400)
        disturb(run, "tasks", 0)
        gang = run.gang if "attempt" in run.status else []
        for pod in gang:
            cluster.run(pod)
        if len(gang) == 2 and all(p["status"]["phase"] in {"Running", "Succeeded"} for p in gang):
            cluster.settle()
            for pod in run.gang:
                if pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp"):
                    cluster.end(pod, Cause.COMPLETED)
    disturb(run, "tasks", 0)
    cluster.collect()
    cluster.settle()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_any_order_and_any_crash_point_converge(events: list[tuple[str, int]]) -> None:
    run = Run(run={"backoffLimit": 1000})
    for event, number in events:
        disturb(run, event, number)
        check_invariants(run)
    behave(run)
    assert run.status["phase"] in {"Completed", "Failed"}
    writes = run.cluster.writes
    run.cluster.settle()
    assert run.cluster.writes == writes, "a second pass over a converged cluster writes nothing"
