"""The examples that change by themselves, on real nodes: a pool that scales by its goals, a canary behind gates."""

from __future__ import annotations

from e2e.stories.story import Story
from testing.stories import autoscaling
from testing.stories.canary import is_rolled_back_then_promoted
from testing.stories.manifests import adopted, claim, corpus, job


def test_a_pool_scales_by_its_goals_and_a_canary_by_its_gates(story: Story) -> None:
    steps = {"training.totalSteps": 40, "checkpoint.intervalSteps": 20}
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("taught", steps))
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    older, newer = (found["metadata"]["name"] for found in story.all("Checkpoint", job="taught"))
    again = adopted("again", "checkpoints", "taught", story.status("Checkpoint", newer)["folder"])
    autoscaling.grows_goes_to_zero_and_wakes(story, newer)
    story.wait_until_gone("InferenceDeployment", autoscaling.NAME)
    story.wait_until(lambda: not story.pods(role="router"), "the first deployment gone")
    is_rolled_back_then_promoted(story, older, newer, again)
