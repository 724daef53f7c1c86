"""A sick node: the rank that it slows down is named, and after two failures on it the gang goes elsewhere."""

from __future__ import annotations

from typing import Any

from e2e.stories.installation import RACK
from e2e.stories.pair import PAIR
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

RUN = {
    **PAIR,
    "training.totalSteps": 1_000_000,
    "checkpoint.intervalSteps": 1_000_000,
    "scheduling.topology": [{"key": RACK, "mode": "Required"}],
}


def test_a_slow_rank_is_named_and_a_node_that_failed_twice_is_avoided(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("ill", RUN))
    slow = trains(story, attempt=0)[1]
    node, name = slow["spec"]["nodeName"], slow["metadata"]["name"]

    story.slow_down(slow, share=0.1)

    found = story.wait("TrainingJob", "ill", lambda found: status_of(found).get("stragglers"), "a straggler named")
    [straggler] = found["status"]["stragglers"]
    assert (straggler["rank"], straggler["pod"], straggler["node"]) == (1, name, node)
    assert float(straggler["ratio"]) > 1.2
    told = story.condition("TrainingJob", "ill", "Straggling")
    assert told["message"].startswith(f"rank 1 on node {node} computes "), told
    assert story.wait_for_event("TrainingJob", "ill", "StragglerFound")

    story.kill(slow)
    again = trains(story, attempt=1)[1]
    assert again["spec"]["nodeName"] == node, "one failure blames no node"
    assert not story.status("TrainingJob", "ill").get("avoidedNodes")
    story.kill(again)
    moved = trains(story, attempt=2)

    status = story.status("TrainingJob", "ill")
    ends = [attempt["failure"] for attempt in status["attempts"] if attempt["number"] < 2]
    assert [(end["cause"], end["node"]) for end in ends] == [("RankKilled", node)] * 2
    assert status["avoidedNodes"] == [node]
    assert {pod["spec"]["nodeName"] for pod in moved} == {"node-a", "node-b"} - {node}
    assert story.condition("TrainingJob", "ill", "BlamedNodesUsed") == {}


def trains(story: Story, attempt: int) -> list[Object]:
    """Wait until an attempt trains; return its pods."""

    def holds(found: Object) -> bool:
        status = status_of(found)
        newest = status.get("attempt") or {}
        step = (status.get("progress") or {}).get("step") or 0
        return bool(newest.get("number") == attempt and status["phase"] == "Running" and step > 0)

    story.wait("TrainingJob", "ill", holds, f"attempt {attempt} trains")
    return story.pods(job="ill", attempt=str(attempt))


def status_of(found: Object) -> dict[str, Any]:
    return found.get("status") or {}
