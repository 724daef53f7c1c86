"""A job of higher priority takes the place of an engine that answers: its streams end whole, and it comes back."""

from __future__ import annotations

from e2e.kueue.quota import queue
from e2e.stories.story import Object, Story
from testing.stories.load import Load
from testing.stories.manifests import EXACT, Manifest, claim, corpus, deployment, job

ENOUGH = 8
QUEUED = {"backend": "kueue", "queueName": "team"}


def test_streams_go_on_while_a_job_takes_the_place_of_an_engine(story: Story) -> None:
    taught = {"training.totalSteps": 40, "checkpoint.intervalSteps": 40}
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("taught", taught))
    story.apply(*queue(story.namespace, {"nvidia.com/gpu": "2", "cpu": "1000", "memory": "1Ti"}))
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    (checkpoint,) = story.all("Checkpoint", job="taught")
    story.apply(shared(story, checkpoint["metadata"]["name"]))
    story.wait("InferenceDeployment", "shared", lambda found: serves(found, "2/2"), "serving with both engines")
    first = {pod["metadata"]["uid"] for pod in story.pods(role="engine")}

    with Load(story.ready_url("shared"), "shared") as load:
        story.more_answers(load, ENOUGH)
        story.apply(urgent(story))
        story.wait_until(lambda: one_waits(story), "one engine in the queue")
        story.wait_for_phase("TrainingJob", "urgent", "Running")
        assert len(placed(story)) == 1, "the quota holds two GPUs"
        story.more_answers(load, ENOUGH)
        story.patch("TrainingJob", "urgent", {"run": {"suspend": True}})
        story.wait_for_phase("TrainingJob", "urgent", "Suspended")
        story.wait("InferenceDeployment", "shared", lambda found: serves(found, "2/2"), "serving with both again")
        story.more_answers(load, ENOUGH)

    assert load.failures == []
    assert len({answer.text for answer in load.answers}) == len(set(load.lengths)), "answers do not depend on evictions"
    assert len(first & {pod["metadata"]["uid"] for pod in story.pods(role="engine")}) == 1
    assert story.status("TrainingJob", "urgent")["attempt"]["number"] == 0


def shared(story: Story, checkpoint: str) -> Manifest:
    """Two engines with a GPU each in the team's queue."""
    found = deployment("shared", {"checkpointRef": {"name": checkpoint}, "dtype": EXACT})
    (pool,) = found["spec"]["pools"]
    pool |= {"replicas": 2, "gpusPerPod": 1, "scheduling": QUEUED, "priorityClassName": f"{story.namespace}-low"}
    pool |= {"maxSurge": 0, "maxUnavailable": 1}
    found["spec"]["engine"]["device"] = "cpu"
    return found


def urgent(story: Story) -> Manifest:
    """A run with a GPU that goes before engines, until it is suspended."""
    run = {"training.totalSteps": 100_000, "checkpoint.intervalSteps": 100_000}
    placing = {"workers.priorityClassName": f"{story.namespace}-high", "scheduling": QUEUED}
    return job("urgent", {**run, **placing, "workers.gpusPerPod": 1, "runtime.device": "cpu"})


def serves(found: Object, ready: str) -> bool:
    status = found.get("status") or {}
    return (status.get("phase"), status.get("ready")) == ("Serving", ready)


def one_waits(story: Story) -> bool:
    (pool,) = story.all("EnginePool")
    return [pool["status"].get(count) for count in ("queuedReplicas", "readyReplicas")] == [1, 1]


def placed(story: Story) -> list[Object]:
    """Engines on a node that have not ended."""
    return [
        pod
        for pod in story.pods(role="engine")
        if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running")
    ]
