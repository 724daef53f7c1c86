"""What a backup brings back, and the line about each thing that it does not."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.gateway.domain.backup import back_up


def job(phase: str = "Running", **run: bool) -> dict[str, Any]:
    spec = {"training": {"totalSteps": 100}, "model": {}, "run": run}
    metadata = {"name": "run", "namespace": "default", "uid": "u"}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": spec, "status": {"phase": phase}}


def saved(step: int) -> dict[str, Any]:
    conditions = [{"type": "Verified", "status": "True"}]
    return {
        "kind": "Checkpoint",
        "metadata": {"name": f"run-{step}", "namespace": "default", "uid": f"c{step}"},
        "spec": {"source": {"save": {"jobRef": {"name": "run", "uid": "u"}, "folder": f"step-{step}"}}},
        "status": {
            "phase": "Complete", "step": step, "folder": f"step-{step}", "digest": "d", "conditions": conditions,
            "storage": {"claimName": "claim", "path": "run"},
        },
    }  # fmt: skip


def jobs_of(*objects: dict[str, Any], checkpoints: tuple[dict[str, Any], ...] = ()) -> tuple[list[Any], list[str]]:
    made = back_up(objects, checkpoints, [])
    return [one for one in made.manifests if one["kind"] == "TrainingJob"], made.notes


def test_a_job_goes_on_from_its_newest_verified_checkpoint() -> None:
    (found,), notes = jobs_of(job(suspend=True), checkpoints=(saved(10), saved(20)))
    assert found["spec"]["modelFrom"] == {"checkpoint": {"name": "run-20", "state": "All"}}
    assert (found["spec"]["run"], "model" in found["spec"]) == ({"suspend": True}, False)
    assert notes == ["trainingjob/run (default): goes on from checkpoint run-20"]


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (job("Completed"), "it is Completed"),
        (job("Cancelling", cancel=True), "it is being cancelled"),
        (job("Suspended", suspend=True, cancel=True), "it is being cancelled"),
    ],
    ids=["ended", "cancelling", "suspended and cancelled"],
)
def test_a_job_that_is_over_does_not_come_back(left: dict[str, Any], why: str) -> None:
    assert jobs_of(left, checkpoints=(saved(10),)) == ([], [f"trainingjob/run (default): left out: {why}"])


def test_a_checkpoint_that_was_adopted_is_adopted_from_the_same_folder() -> None:
    found = saved(10)
    found["spec"]["source"] = {"import": {"storage": {"claimName": "claim"}, "folder": "step-10", "digest": "d"}}
    found["status"]["storage"] = {"claimName": "claim"}
    (again,) = back_up([], [found], []).manifests
    assert again["spec"]["source"] == found["spec"]["source"], "without a path it lies at the top of the claim"


def test_what_is_being_deleted_does_not_come_back() -> None:
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    ended, deployment = saved(20), {**job(), "kind": "InferenceDeployment"}
    for found in (ended, deployment):
        found["metadata"] = {**found["metadata"], **going}
    made = back_up([job()], [saved(10), ended], [deployment])
    assert [one["metadata"]["name"] for one in made.manifests] == ["run-10", "run"]
    assert made.manifests[-1]["spec"]["modelFrom"]["checkpoint"]["name"] == "run-10"
    assert made.notes[:2] == [
        "checkpoint/run-20 (default): left out: it is being deleted",
        "inferencedeployment/run (default): left out: it is being deleted",
    ]


@pytest.mark.parametrize(
    ("state", "says"), [("All", "goes on from checkpoint old-10, as it did"), ("Weights", "begins anew")]
)
def test_a_job_that_began_at_a_checkpoint_and_has_none_of_its_own_is_told_so(state: str, says: str) -> None:
    found = job()
    found["spec"]["modelFrom"] = {"checkpoint": {"name": "old-10", "state": state}}
    (again,), (note,) = jobs_of(found)
    assert again["spec"] == found["spec"]
    assert note.startswith(f"trainingjob/run (default): {says}: it has no verified checkpoint")
