"""The story of a canary under load: a revision that fails its gate is rolled back, the next one passes."""

from __future__ import annotations

import json
from typing import Any

from testing.stories.load import Load
from testing.stories.manifests import Manifest
from testing.stories.object_views import Object
from testing.stories.served_examples import canary
from testing.stories.stage import Stage

NAME = "support-agent"


def is_rolled_back_then_promoted(stage: Stage, older: str, newer: str, again: Manifest) -> None:
    """Tell the story of `examples/serve-canary` with two verified checkpoints; no request fails.

    `again` is a Checkpoint with the weights of the newer one under another name: a revision that failed is not tried
    again.
    """
    question = json.dumps({"prompt": "Then the boiler", "expect": "", "max_tokens": 8})
    stage.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "known-questions"},
            "data": {"questions.jsonl": question},
        }
    )
    stage.apply(canary(older, "0.001"))
    stage.wait_for_phase("InferenceDeployment", NAME, "Serving")
    first = stage.status("InferenceDeployment", NAME)["currentRevision"]
    old_print = f"fp_{stage.status('Checkpoint', older)['digest'][:10]}"

    with Load(stage.ready_url(NAME), NAME, lengths=(8, 8, 160), sessions=True) as load:
        stage.apply(canary(newer, "0.001"))
        stage.wait("InferenceDeployment", NAME, rolled_back, "rolled back")
        status = stage.status("InferenceDeployment", NAME)
        failed = status["rollout"]["toRevision"]
        gate = next(found for found in status["rollout"]["canary"]["gates"] if found["verdict"] == "Failed")
        asked = status["rollout"]["canary"]["gates"][0]
        assert (asked["metric"], asked["verdict"], asked["value"], asked["samples"]) == (
            "eval:known-questions",
            "Passed",
            "1",
            1,
        )
        assert (gate["metric"], gate["samples"] >= 20, float(gate["value"]) > 0.001) == ("ttftP95Ms", True, True)
        assert (status["currentRevision"], status["currentCheckpoint"]["name"]) == (first, older)
        assert f"revision {failed} was rolled back: GateFailed: ttftP95Ms at 25 %" in status["message"]
        stage.wait_until(lambda: revisions(stage) == {first}, "the pods of the failed revision gone")
        since = len(load.answers)
        stage.more_answers(load, 20)
        assert {answer.fingerprint for answer in load.answers[since + 3 :]} == {old_print}

        third = again["metadata"]["name"]
        stage.apply(again, canary(third, "60000"))
        stage.wait("InferenceDeployment", NAME, lambda found: promoted(found, third), "promoted")
    assert load.failures == []
    second = stage.status("InferenceDeployment", NAME)["currentRevision"]
    assert second not in (first, failed)
    stage.wait_for_event("InferenceDeployment", NAME, "CanaryPromoted")
    events = stage.events("InferenceDeployment", NAME)
    assert (len(events["CanaryFailed"]), len(events["CanaryPromoted"])) == (1, 1)
    stage.delete("InferenceDeployment", NAME)


def rollout_of(found: Object) -> dict[str, Any]:
    return (found.get("status") or {}).get("rollout") or {}


def rolled_back(found: Object) -> bool:
    return rollout_of(found).get("phase") == "RolledBack" and (found["status"].get("message") or "").startswith(
        "revision"
    )


def promoted(found: Object, checkpoint: str) -> bool:
    current = (found["status"].get("currentCheckpoint") or {}).get("name")
    return (rollout_of(found).get("phase"), current) == ("Completed", checkpoint)


def revisions(stage: Stage) -> set[str]:
    return {pod["metadata"]["labels"]["stoker.dev/revision"] for pod in stage.pods(role="engine")}
