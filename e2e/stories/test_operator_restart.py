"""Story 5: the operator is restarted, upgraded and rolled back, and its leader is killed.

A job and a deployment under load run meanwhile: no pod restarts, no request fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.charts.helm import NAMESPACE, STOKER
from e2e.charts.release import Releases
from e2e.stories.installation import IMAGES, VALUES
from e2e.stories.operator_pods import OperatorPods
from e2e.stories.story import Object, Story
from testing.stories.load import Load
from testing.stories.manifests import claim, corpus, deployment, job

NEXT = {**IMAGES, "control": {**IMAGES["control"], "tag": "e2e-next"}}
STEPS = {"training.totalSteps": 100_000, "checkpoint.intervalSteps": 100, "checkpoint.maxToKeep": 2}
ENOUGH = 5
"""Answers to wait for after each change."""


@pytest.fixture
def operator(story: Story, releases: Releases) -> Iterator[OperatorPods]:
    """The operator's pods, as installed before and after the story."""
    yield OperatorPods(story)
    releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values=VALUES)


def test_pods_and_requests_know_nothing_of_the_operators_restarts(
    story: Story, operator: OperatorPods, releases: Releases
) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("long", STEPS))
    story.wait("TrainingJob", "long", lambda found: saved(found) > 0, "a first save")
    story.apply(
        deployment("teller", {"checkpointRef": {"name": story.all("Checkpoint", job="long")[0]["metadata"]["name"]}})
    )
    story.wait_for_phase("InferenceDeployment", "teller", "Serving")
    before = runs(story)
    assert len(before) == 3

    with Load(story.ready_url("teller"), "teller", lengths=(16, 64)) as load:
        operator.restart()
        goes_on(story, load)

        killed = operator.holder()
        story.kill(operator.leader())
        story.wait_until(lambda: operator.holder() not in ("", killed), "led by another")
        goes_on(story, load)

        releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values={**VALUES, "images": NEXT})
        assert operator.image() == "localhost/stoker/control:e2e-next"
        goes_on(story, load)

    assert load.failures == []
    assert runs(story) == before, "no pod was restarted or replaced"
    status = story.status("TrainingJob", "long")
    assert (status["attempt"]["number"], status.get("restarts", 0)) == (0, 0)
    assert len(load.fingerprints) == 1


def goes_on(story: Story, load: Load) -> None:
    """Assert that requests are answered and that a new save of the job becomes a Checkpoint."""
    answers, step = len(load.answers), saved(story.get("TrainingJob", "long"))
    story.wait_until(lambda: load.failures or len(load.answers) >= answers + ENOUGH, f"{ENOUGH} more answers")
    story.wait("TrainingJob", "long", lambda found: saved(found) > step, f"a save after step {step}")


def saved(found: Object) -> int:
    """Return the step of the job's newest verified checkpoint."""
    return int(((found.get("status") or {}).get("newestVerifiedCheckpoint") or {}).get("step", 0))


def runs(story: Story) -> dict[str, tuple[str, int, str]]:
    """Return uid, restarts and container start of each of the product's pods by name, without task pods."""
    found = {}
    for role in ("trainer", "engine", "router"):
        for pod in story.pods(role=role):
            (container,) = pod["status"]["containerStatuses"]
            began = container["state"].get("running", {}).get("startedAt", "")
            found[pod["metadata"]["name"]] = (pod["metadata"]["uid"], container["restartCount"], began)
    return found
