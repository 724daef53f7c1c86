"""Story 4: `kubectl drain` of a node under a running job.

The job saves, its pod goes, and it resumes elsewhere without a lost step.
"""

from __future__ import annotations

from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job
from testing.stories.object_views import FIGURES

RUN = {
    "workers.gpusPerPod": 1,
    "runtime.device": "cpu",
    "training.totalSteps": 100_000,
    "checkpoint.intervalSteps": 100_000,
}
"""A run without periodic saves: its resumed save was made because of the drain."""


def test_a_drained_node_costs_no_step(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("moved", RUN))
    story.wait("TrainingJob", "moved", lambda found: step(found) >= 20, "at step 20")
    [pod] = story.pods(job="moved")
    node = pod["spec"]["nodeName"]

    story.cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")

    moved = story.wait(
        "TrainingJob", "moved", lambda found: found["status"]["attempt"]["number"] == 1, "in its second attempt"
    )
    status, first = moved["status"], moved["status"]["attempts"][0]
    assert (first["failure"]["cause"], first["failure"]["action"]) == ("Interrupted", "RetryFree")
    assert first["lastStep"] >= 20
    assert status["attempt"]["resumedFrom"]["step"] == first["lastStep"]
    assert (status["lostSteps"], status["failuresWithoutProgress"]) == (0, 0)
    story.wait("TrainingJob", "moved", lambda found: step(found) > first["lastStep"], "further")
    [elsewhere] = story.pods(job="moved", attempt="1")
    assert elsewhere["spec"]["nodeName"] != node
    [saved] = story.all("Checkpoint", job="moved")
    assert saved["status"]["step"] == first["lastStep"]
    assert saved["status"]["verifiedBy"] == "Agent"
    assert sorted(story.figures(saved["metadata"]["name"])) == sorted(FIGURES)


def step(found: Object) -> int:
    return int(((found.get("status") or {}).get("progress") or {}).get("step") or 0)
