"""Story 7: a job without a place names the missing resource, and starts when a node with capacity joins."""

from __future__ import annotations

from e2e.cluster.spec import NodeSpec
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

LARGE = {"workers.gpusPerPod": 8, "workers.ranksPerPod": 1, "runtime.device": "cpu", "training.totalSteps": 40}
HEAVY = {"workers.resources": {"requests": {"memory": "900Gi"}}}


def test_a_job_says_which_resource_is_missing_and_starts_when_a_node_brings_it(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("large", LARGE), job("heavy", HEAVY))

    large = story.wait("TrainingJob", "large", lambda found: "nvidia.com/gpu" in message(found), "waiting for GPUs")
    heavy = story.wait("TrainingJob", "heavy", lambda found: "memory" in message(found), "waiting for memory")
    assert message(large).startswith(
        "WaitingForGPUs: 0 of 1 pods fit on 2 nodes, nvidia.com/gpu: 8 free, 8 needed, "
        "8 of them on one node for each pod; not used: 1 tainted "
    )
    assert "2 of 3 nodes lack memory" in message(heavy)
    assert [found["status"]["phase"] for found in (large, heavy)] == ["Pending", "Pending"]
    assert story.condition("TrainingJob", "large", "Ready")["status"] == "False"
    assert story.condition("TrainingJob", "large", "Ready")["reason"] == "WaitingForGPUs"
    assert story.condition("TrainingJob", "large", "Stalled") == {}, "waiting for capacity is no mistake"

    story.cluster.add_node(NodeSpec(name="node-large", gpus=8))

    story.wait_for_phase("TrainingJob", "large", "Completed")
    [pod] = story.pods(job="large")
    assert pod["spec"]["nodeName"] == "node-large"
    assert story.status("TrainingJob", "large")["restarts"] == 0
    assert story.status("TrainingJob", "heavy")["phase"] == "Pending"


def message(found: Object) -> str:
    return str((found.get("status") or {}).get("message") or "")
