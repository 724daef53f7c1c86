"""A prefill replica whose two stages lie on two nodes computes prompts for a decode engine of one rank, and ends whole
when one of its pods is killed.
"""

from __future__ import annotations

import itertools

from e2e.stories.story import Object, Story
from testing.stories.load import Load
from testing.stories.manifests import EXACT, Manifest, claim, corpus, deployment, job
from testing.stories.split_probe import is_split, paired

NAME = "wide"
PROMPT = "Then the boiler met the captain. Then the captain met coal. Then steam met a whistle."
ENOUGH = 4
"""Answers to wait for in each state."""
MOST_OF_A_NODE = 3
"""GPUs of each pod: no node has room for two."""


def test_stages_on_two_nodes_hand_their_layers_over(story: Story) -> None:
    steps = {"training.totalSteps": 10, "checkpoint.intervalSteps": 10}
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("taught", steps))
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    (saved,) = (found["metadata"]["name"] for found in story.all("Checkpoint", job="taught"))
    story.apply(wide(saved))
    story.wait("InferenceDeployment", NAME, paired, "serving in pairs")
    leader, member = prefill(story)
    assert {pod["spec"]["nodeName"] for pod in (leader, member)} == {"node-a", "node-b"}
    comes_to_share(story, leader)

    with Load(story.ready_url(NAME), NAME, lengths=(16, 24)) as load:
        story.more_answers(load, ENOUGH)
        story.kill(member)
        story.wait_until(lambda: told(story) == "NoPrefillEngine", "without a prefill engine")
        story.more_answers(load, ENOUGH)
        story.wait("InferenceDeployment", NAME, paired, "in pairs again")
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"
    again = prefill(story)
    assert {pod["metadata"]["uid"] for pod in again}.isdisjoint({leader["metadata"]["uid"], member["metadata"]["uid"]})
    comes_to_share(story, again[0])


def wide(checkpoint: str) -> Manifest:
    """A deployment with a prefill replica of two pods, a stage in each, and a decode engine of one rank."""
    stages = {"podsPerReplica": 2, "gpusPerPod": MOST_OF_A_NODE, "ranksPerPod": 1, "parallelism": {"pipeline": 2}}
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": 1, "gracePeriodSeconds": 20, **stages},
        {"name": "decode", "role": "decode", "replicas": 1, "gracePeriodSeconds": 20},
    ]
    changes = {
        "pools": pools,
        "engine.device": "cpu",
        "engine.transfer": {"require": "any"},
        "router.policy": "cacheAware",
        "router.holdSeconds": 60,
    }
    return deployment(NAME, {"checkpointRef": {"name": checkpoint}, "dtype": EXACT}, changes)


def comes_to_share(story: Story, leader: Object) -> None:
    """Wait for a request that both sides compute: a new prompt each time, for a cached one is not sent."""
    (decode,) = running(story, "decode")
    tries = itertools.count()
    story.wait_until(lambda: is_split(leader, decode, NAME, f"{PROMPT} {next(tries)}"), "a request that both compute")


def prefill(story: Story) -> list[Object]:
    """The pods of the prefill replica, the leader first."""
    return sorted(running(story, "prefill"), key=lambda pod: str(pod["metadata"]["name"]))


def running(story: Story, pool: str) -> list[Object]:
    pods = story.pods(role="engine", pool=pool)
    return [pod for pod in pods if pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp")]


def told(story: Story) -> str:
    return str(story.condition("InferenceDeployment", NAME, "Disaggregated")["reason"])
