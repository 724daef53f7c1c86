"""A canary under load: a revision that fails its gate is rolled back, the next one passes; no request fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testing.stories.load import Load
from testing.stories.manifests import Manifest, adopted, claim, deployment
from testing.stories.story_cluster import Object, StoryCluster

STEPS = [{"percent": 50, "holdSeconds": 1, "minRequests": 20}, {"percent": 100, "holdSeconds": 1, "minRequests": 20}]


def teller(checkpoint: str, limit_ms: str) -> Manifest:
    manifest = deployment("teller", {"checkpointRef": {"name": checkpoint}})
    gates = [{"metric": "errorRate", "max": "0"}, {"metric": "ttftP95Ms", "max": limit_ms}]
    evals = [{"name": "tales", "prompts": {"name": "questions", "key": "questions.jsonl"}, "minScore": "0.9"}]
    canary = {"steps": STEPS, "metricGates": gates, "evalGates": evals}
    manifest["spec"]["rollout"] = {"type": "canary", "canary": canary}
    return manifest


def test_a_revision_that_fails_its_gate_is_rolled_back_and_the_next_one_replaces_the_old(
    cluster: StoryCluster, taught: Path
) -> None:
    question = json.dumps({"prompt": "Then the boiler", "expect": "", "max_tokens": 8})
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "questions"},
            "data": {"questions.jsonl": question},
        }
    )
    older, newer = sorted(path.name for path in taught.glob("step-*"))
    cluster.apply(claim("archive", taught.parent), adopted("older", "archive", "taught", older))
    cluster.apply(adopted("newer", "archive", "taught", newer), teller("older", "0.001"))
    cluster.wait_for_phase("InferenceDeployment", "teller", "Serving")
    first = cluster.status("InferenceDeployment", "teller")["currentRevision"]
    old_print = f"fp_{cluster.status('Checkpoint', 'older')['digest'][:10]}"

    with Load(cluster.url("teller"), "teller", lengths=(8, 8, 160), sessions=True) as load:
        cluster.apply(teller("newer", "0.001"))
        cluster.wait("InferenceDeployment", "teller", rolled_back, "rolled back")
        status = cluster.status("InferenceDeployment", "teller")
        failed = status["rollout"]["toRevision"]
        gate = next(found for found in status["rollout"]["canary"]["gates"] if found["verdict"] == "Failed")
        asked = status["rollout"]["canary"]["gates"][0]
        assert (asked["metric"], asked["verdict"], asked["value"], asked["samples"]) == ("eval:tales", "Passed", "1", 1)
        assert (gate["metric"], gate["samples"] >= 20, float(gate["value"]) > 0.001) == ("ttftP95Ms", True, True)
        assert (status["currentRevision"], status["currentCheckpoint"]["name"]) == (first, "older")
        assert f"revision {failed} was rolled back: GateFailed: ttftP95Ms at 50 %" in status["message"]
        cluster.wait_until(lambda: revisions(cluster) == {first}, "the pods of the failed revision gone")
        since = len(load.answers)
        cluster.wait_until(lambda: load.failures or len(load.answers) >= since + 20, "more answers")
        assert {answer.fingerprint for answer in load.answers[since + 3 :]} == {old_print}

        cluster.apply(adopted("again", "archive", "taught", newer), teller("again", "60000"))
        cluster.wait("InferenceDeployment", "teller", completed, "promoted")
    assert load.failures == []
    second = cluster.status("InferenceDeployment", "teller")["currentRevision"]
    assert second not in (first, failed)
    events = cluster.events("InferenceDeployment", "teller")
    assert (len(events["CanaryFailed"]), len(events["CanaryPromoted"])) == (1, 1)
    cluster.delete("InferenceDeployment", "teller")


def rollout_of(found: Object) -> dict[str, Any]:
    return (found.get("status") or {}).get("rollout") or {}


def rolled_back(found: Object) -> bool:
    return rollout_of(found).get("phase") == "RolledBack" and (found["status"].get("message") or "").startswith(
        "revision"
    )


def completed(found: Object) -> bool:
    current = (found["status"].get("currentCheckpoint") or {}).get("name")
    return (rollout_of(found).get("phase"), current) == ("Completed", "again")


def revisions(cluster: StoryCluster) -> set[str]:
    return {pod["metadata"]["labels"]["stoker.dev/revision"] for pod in cluster.pods(role="engine")}
