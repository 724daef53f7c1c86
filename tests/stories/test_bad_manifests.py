"""Manifests that cannot work are refused, or end in a condition that names the field, file or object.

Deleting them leaves nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from testing.stories.manifests import adopted, claim, corpus, deployment, job
from testing.stories.mistakes import break_model, mistakes, says, surroundings
from testing.stories.object_views import Object
from testing.stories.story_cluster import StoryCluster


def test_what_admission_refuses_names_the_field(cluster: StoryCluster) -> None:
    wrong = job("wrong", {"training.globalBatchSize": 3})
    misspelt = job("misspelt", {"training.totalStep": 3, "training.totalSteps": None})
    both = deployment("both", {"uri": "pvc://models/a", "checkpointRef": {"name": "x"}})
    doomed = adopted("doomed", "archive", "runs", "step-00000001.00000000", deletionPolicy="Delete")

    errors = [result.get("error", "") for result in cluster.try_apply(wrong, misspelt, both, doomed)]

    assert "spec.training: " in errors[0]
    assert "globalBatchSize 3 is not a multiple of microBatchSize 2 x data-parallel size 1 = 2" in errors[0]
    assert "spec.training" in errors[1]
    assert "totalStep" in errors[1]
    assert "spec.model" in errors[2]
    assert "spec.deletionPolicy" in errors[3]
    assert not cluster.all("TrainingJob")
    assert not cluster.all("Checkpoint")


def test_what_cannot_run_says_why_and_goes_without_a_trace(cluster: StoryCluster, tmp_path: Path) -> None:
    break_model(tmp_path / "models")
    cluster.apply(*surroundings(), claim("models", tmp_path / "models"))
    cases = mistakes()
    cluster.apply(*(manifest for manifest, _, _ in cases))

    for manifest, ends, text in cases:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = cluster.wait(kind, name, says(ends, text), text)
        assert text in message(found), found["status"]

    for name, cause in (("no-data", "DataError"), ("bad-model", "ModelError")):
        failure = cluster.status("TrainingJob", name)["lastFailure"]
        assert (failure["cause"], failure["action"], cluster.status("TrainingJob", name)["restarts"]) == (
            cause,
            "Fail",
            0,
        )
        cluster.wait_for_event("TrainingJob", name, cause)
    for manifest, _, _ in cases:
        cluster.delete(manifest["kind"], manifest["metadata"]["name"])
    for kind in ("TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool", "Pod", "Service"):
        cluster.wait_until(partial(no_more, cluster, kind), f"no {kind} left")
    cluster.wait_until(
        lambda: [found["metadata"]["name"] for found in cluster.all("ConfigMap")] == ["tales"],
        "only the user's is left",
    )


def test_a_job_that_waits_for_a_claim_starts_when_it_comes(cluster: StoryCluster) -> None:
    cluster.apply(corpus(), claim("logs"), job("patient", {"training.totalSteps": 5}))
    waiting = cluster.wait("TrainingJob", "patient", lambda found: "checkpoints" in message(found), "waiting")
    assert "attempt" not in waiting["status"]
    cluster.apply(claim("checkpoints"))
    cluster.wait_for_phase("TrainingJob", "patient", "Completed")


def no_more(cluster: StoryCluster, kind: str) -> bool:
    return not cluster.all(kind)


def message(found: Object) -> str:
    return str((found.get("status") or {}).get("message") or "")
