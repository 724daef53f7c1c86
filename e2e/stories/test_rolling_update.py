"""Story 6: a deployment moves to a newer checkpoint while clients stream: no request fails, no stream is cut."""

from __future__ import annotations

from e2e.stories.story import Object, Story
from testing.stories.load import Load
from testing.stories.manifests import EXACT, Manifest, claim, corpus, deployment, job

ENOUGH = 8
"""Answers to wait for before and after the change."""


def test_streams_go_on_through_a_rolling_update_to_a_newer_checkpoint(story: Story) -> None:
    steps = {"training.totalSteps": 40, "checkpoint.intervalSteps": 20}
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("taught", steps))
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    older, newer = (found["metadata"]["name"] for found in story.all("Checkpoint", job="taught"))
    story.apply(teller(older))
    story.wait("InferenceDeployment", "teller", lambda found: serves(found, older), "serving the older checkpoint")
    prints = [f"fp_{story.status('Checkpoint', name)['digest'][:10]}" for name in (older, newer)]

    with Load(story.ready_url("teller"), "teller") as load:
        story.more_answers(load, ENOUGH)
        assert load.fingerprints == prints[:1]
        story.apply(teller(newer))
        story.wait("InferenceDeployment", "teller", lambda found: serves(found, newer), "moved to the newer checkpoint")
        story.wait_until(lambda: len(story.pods(role="engine")) == 1, "the old engine gone")
        story.more_answers(load, ENOUGH)

    assert load.failures == []
    assert load.fingerprints == prints
    same = {(answer.fingerprint, answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == 2 * len(set(load.lengths)), "greedy answers depend on nothing but the model"
    assert story.status("Checkpoint", newer)["inUseBy"] == [{"kind": "InferenceDeployment", "name": "teller"}]

    story.delete("InferenceDeployment", "teller")
    story.wait_until(lambda: not story.pods(role="engine") and not story.pods(role="router"), "every pod of it gone")
    assert [kind for kind in ("InferenceDeployment", "EnginePool") if story.all(kind)] == []


def teller(checkpoint: str) -> Manifest:
    return deployment("teller", {"checkpointRef": {"name": checkpoint}, "dtype": EXACT})


def serves(found: Object, checkpoint: str) -> bool:
    status = found.get("status") or {}
    current = (status.get("currentCheckpoint") or {}).get("name")
    return (status.get("phase"), current, status.get("ready")) == ("Serving", checkpoint, "1/1")
