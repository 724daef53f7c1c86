"""Story 2: a trainer pod is killed, then a whole node.

Each time the job goes on from the newest verified checkpoint and reports the cost.
"""

from __future__ import annotations

from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

STEPS = 400
EVERY = 25
RUN = {
    "workers.replicas": 2,
    "workers.gpusPerPod": 4,
    "workers.ranksPerPod": 1,
    "runtime.device": "cpu",
    "training.totalSteps": STEPS,
    "checkpoint.intervalSteps": EVERY,
}
"""Two pods that cannot share a node."""


def test_a_killed_pod_and_a_killed_node_cost_steps_since_the_newest_verified_checkpoint(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("hit", RUN))
    running(story, attempt=0, save=EVERY)
    leader, second = story.pods(job="hit")
    assert {leader["spec"]["nodeName"], second["spec"]["nodeName"]} == {"node-a", "node-b"}

    story.kill(second)

    first = ended_attempt(story, 0)
    assert (first["failure"]["cause"], first["failure"]["exitCode"]) == ("RankKilled", 137)
    assert first["failure"]["action"] == "Retry"
    running(story, attempt=1, save=newest(story) + EVERY)
    lost = story.pods(job="hit", attempt="1")[0]["spec"]["nodeName"]

    story.cluster.kill_node(lost)

    second_end = ended_attempt(story, 1)
    assert second_end["failure"]["node"] == lost, second_end
    assert second_end["failure"]["action"] == "RetryFree"
    assert "NodeLost" in second_end["failure"]["detail"]
    waiting = story.wait(
        "TrainingJob", "hit", lambda found: "WaitingForGPUs: 1 of 2" in str(found["status"].get("message")), "waiting"
    )
    assert waiting["status"]["phase"] == "Pending"
    story.cluster.add_node(next(node.spec for node in story.cluster.nodes.values() if node.name == lost))

    story.wait_for_phase("TrainingJob", "hit", "Completed")
    status = story.status("TrainingJob", "hit")
    resumed = [second_end["resumedFrom"]["step"], status["attempt"]["resumedFrom"]["step"]]
    assert [step % EVERY for step in resumed] == [0, 0]
    assert resumed[1] > resumed[0] >= EVERY
    assert status["restarts"] == 2
    assert status["lostSteps"] == sum(
        end["lastStep"] - step for end, step in zip((first, second_end), resumed, strict=True)
    )
    assert status["newestVerifiedCheckpoint"]["step"] == STEPS


def running(story: Story, attempt: int, save: int) -> None:
    """Wait until an attempt has made the verified save `save`, or a later one, by itself."""

    def holds(found: Object) -> bool:
        status = found.get("status") or {}
        number = (status.get("attempt") or {}).get("number", -1)
        return bool(number == attempt and (status.get("newestVerifiedCheckpoint") or {}).get("step", 0) >= save)

    story.wait("TrainingJob", "hit", holds, f"step {save} saved by attempt {attempt}")


def newest(story: Story) -> int:
    return int(story.status("TrainingJob", "hit")["newestVerifiedCheckpoint"]["step"])


def ended_attempt(story: Story, number: int) -> Object:
    """Return an attempt's record in the status once a later one has begun."""

    def ended(found: Object) -> bool:
        return bool(found["status"]["attempt"]["number"] > number)

    found = story.wait("TrainingJob", "hit", ended, f"beyond attempt {number}")
    attempts: list[Object] = found["status"]["attempts"]
    return next(attempt for attempt in attempts if attempt["number"] == number)
