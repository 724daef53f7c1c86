"""The example of prefill and decode pools on two nodes: either engine is killed, both lose each other, and each node is
drained under load; no answer is lost.
"""

from __future__ import annotations

import itertools

from e2e.cluster.partition import partition
from e2e.stories.story import Object, Story
from testing.stories.load import Load
from testing.stories.manifests import Manifest, claim, corpus, job
from testing.stories.served_examples import in_pairs
from testing.stories.split_probe import is_split, paired

NAME = "long-context"
PROMPT = "Then the boiler met the captain. Then the captain met coal. Then steam met a whistle."
ENOUGH = 6
"""Answers to wait for in each state."""


def test_no_answer_is_lost_while_engines_die_lose_each_other_or_leave_their_nodes(story: Story) -> None:
    steps = {"training.totalSteps": 40, "checkpoint.intervalSteps": 20}
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("taught", steps))
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    *_, newest = (found["metadata"]["name"] for found in story.all("Checkpoint", job="taught"))
    story.apply(pairs(newest))
    story.wait("InferenceDeployment", NAME, paired, "serving in pairs")
    comes_to_share(story)

    with Load(story.ready_url(NAME), NAME, lengths=(16, 24, 100)) as load:
        story.more_answers(load, ENOUGH)
        story.kill(engine(story, "prefill"))
        story.wait_until(lambda: told(story) == "NoPrefillEngine", "without a prefill engine")
        story.more_answers(load, ENOUGH)
        story.wait("InferenceDeployment", NAME, paired, "in pairs again")

        story.kill(engine(story, "decode"))
        story.wait_until(lambda: told(story) == "NoDecodeEngine", "without a decode engine")
        story.more_answers(load, ENOUGH)
        story.wait("InferenceDeployment", NAME, paired, "in pairs once more")

        ends = [engine(story, pool)["status"]["podIP"] for pool in ("prefill", "decode")]
        with partition(story.cluster.nodes.values(), *ends):
            story.more_answers(load, ENOUGH)
        story.more_answers(load, ENOUGH)

        for node, reason in (("node-b", "NoDecodeEngine"), ("node-a", "NoPrefillEngine")):
            story.cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
            story.wait_until(lambda gone=reason: told(story) == gone, f"{reason} while {node} is drained")  # type: ignore[misc]
            story.more_answers(load, ENOUGH)
            story.cluster.kubectl("uncordon", node)
            story.wait("InferenceDeployment", NAME, paired, f"in pairs after the drain of {node}")
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"
    comes_to_share(story)


def pairs(checkpoint: str) -> Manifest:
    """The example with a prefill engine on one node and a decode engine on the other, and two routers."""
    manifest = in_pairs({"checkpointRef": {"name": checkpoint}})
    for pool, node in zip(manifest["spec"]["pools"], ("node-a", "node-b"), strict=True):
        pool["nodeSelector"] = {"kubernetes.io/hostname": node}
    manifest["spec"]["router"]["replicas"] = 2
    return manifest


def comes_to_share(story: Story) -> None:
    """Wait for a request that both engines compute: a new prompt each time, for a cached one is not sent."""
    tries = itertools.count()
    prefill, decode = engine(story, "prefill"), engine(story, "decode")
    story.wait_until(
        lambda: is_split(prefill, decode, NAME, f"{PROMPT} {next(tries)}"), "a request that both engines compute"
    )


def engine(story: Story, pool: str) -> Object:
    """Return the running engine of a pool."""
    (pod,) = [
        pod
        for pod in story.pods(role="engine", pool=pool)
        if pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    return pod


def told(story: Story) -> str:
    return str(story.condition("InferenceDeployment", NAME, "Disaggregated")["reason"])
