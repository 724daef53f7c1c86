"""An elastic run goes on with one worker while a node is away, and with two after its return.

Every step is trained once with the same global batch, and each change of the size begins at a verified save.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from e2e.stories.installation import ELASTIC
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

RUN = {
    "workers.replicas": 2,
    "workers.gpusPerPod": 4,
    "workers.ranksPerPod": 1,
    "runtime.device": "cpu",
    "run.elastic": {"minWorkers": 1, "maxWorkers": 2},
    "training.totalSteps": 1_000_000,
    "checkpoint.intervalSteps": 20,
}
"""Two pods that cannot share a node."""


def test_a_run_shrinks_with_a_lost_node_and_grows_with_its_return(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("train", RUN))
    before = trains(story, workers=2, beyond=20)
    assert before.get("attempts", []) == [], "no attempt ended before the node was lost"
    lost = alive(story)[1]["spec"]["nodeName"]

    story.cluster.kill_node(lost)

    small = trains(story, workers=1, beyond=saved(story))
    assert small["elastic"]["workers"] == 1
    [first] = [attempt for attempt in small["attempts"] if attempt["number"] == 0]
    assert first["failure"]["node"] == lost, first
    assert {pod["spec"]["nodeName"] for pod in alive(story)} == {"node-a", "node-b"} - {lost}

    story.cluster.add_node(next(node.spec for node in story.cluster.nodes.values() if node.name == lost))

    whole = trains(story, workers=2, beyond=saved(story))
    assert {pod["spec"]["nodeName"] for pod in alive(story)} == {"node-a", "node-b"}
    assert whole["attempt"]["resumedFrom"]["step"] > small["attempt"]["resumedFrom"]["step"]
    assert whole["lostSteps"] == small["lostSteps"], "it was saved before it grew"
    assert whole["restarts"] == small["restarts"] == 1, "only the lost node is a failure"
    assert whole["pinned"]["rendered"]["config"]["training"]["global_batch_size"] == 4
    resized = story.events("TrainingJob", "train")["Resized"]
    assert {said.partition(":")[0] for said in resized} == {"workers 2 -> 1", "workers 1 -> 2"}
    changed = [datetime.fromisoformat(status["elastic"]["changedAt"]) for status in (small, whole)]
    assert (changed[1] - changed[0]).total_seconds() >= ELASTIC["restSeconds"]


def trains(story: Story, workers: int, beyond: int) -> dict[str, Any]:
    """Wait until the run has made a verified save beyond a step with so many workers; return the job's status."""

    def holds(found: Object) -> bool:
        status = found.get("status") or {}
        step = (status.get("newestVerifiedCheckpoint") or {}).get("step", 0)
        first = (status.get("attempt") or {}).get("firstStep") or 0
        return status.get("phase") == "Running" and step > max(first, beyond) and status["worldSize"] == workers

    found = story.wait("TrainingJob", "train", holds, f"a save beyond {beyond} by {workers} workers")
    status: dict[str, Any] = found["status"]
    return status


def saved(story: Story) -> int:
    return int(story.status("TrainingJob", "train")["newestVerifiedCheckpoint"]["step"])


def alive(story: Story) -> list[Object]:
    """Return the pods of the newest attempt."""
    number = story.status("TrainingJob", "train")["attempt"]["number"]
    return story.pods(job="train", attempt=str(number))
