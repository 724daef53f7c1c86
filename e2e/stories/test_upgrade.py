"""An upgrade from the previous release on real nodes, under a training run and streams: nothing restarts or fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.charts.helm import NAMESPACE
from e2e.charts.release import Releases
from e2e.stories.installation import IMAGES, VALUES
from e2e.stories.operator_pods import OperatorPods
from e2e.stories.story import Object, Story
from e2e.stories.test_operator_restart import runs
from e2e.stories.test_quickstart import install_again
from e2e.upgrade.previous import TAG, checkout, skip_without_history
from testing.stories.load import Load
from testing.stories.manifests import claim, corpus, deployment, job, save_now

OLD_IMAGES = {name: {**image, "tag": TAG} for name, image in IMAGES.items()}
OLD_VALUES: dict[str, Any] = {
    **{name: VALUES[name] for name in ("replicas", "nodeSelector", "tolerations", "config")},
    "images": OLD_IMAGES,
}
"""Those that the previous chart has."""
ENOUGH = 6
"""Answers to wait for after each change."""


@pytest.fixture
def previous(releases: Releases, tmp_path: Path) -> Iterator[Releases]:
    """The previous release in place of this one, while the cluster has no object of the product."""
    skip_without_history()
    charts = checkout(tmp_path / "previous") / "charts"
    for release in ("stoker", "stoker-crds"):
        releases.uninstall(release, NAMESPACE)
    try:
        releases.upgrade("stoker-crds", charts / "stoker-crds", NAMESPACE)
        releases.upgrade("stoker", charts / "stoker", NAMESPACE, "--wait", "--timeout=300s", values=OLD_VALUES)
        yield releases
    finally:
        install_again(releases)


def test_an_upgrade_restarts_nothing_and_fails_no_request_and_new_work_gets_the_new_release(
    previous: Releases, story: Story
) -> None:
    operator = OperatorPods(story)
    assert operator.image() == f"localhost/stoker/control:{TAG}"
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("base", {"training.totalSteps": 20}))
    story.wait_for_phase("TrainingJob", "base", "Completed")
    story.apply(job("train", {"training.totalSteps": 1_000_000, "checkpoint.intervalSteps": 1_000_000}))
    story.apply(deployment("teller", {"checkpointSelector": {"jobRef": {"name": "base"}}}))
    story.wait_for_phase("InferenceDeployment", "teller", "Serving")
    story.wait_for_phase("TrainingJob", "train", "Running")
    assert images(story, "trainer", "engine", "router") == {f"localhost/stoker/{name}:{TAG}" for name in IMAGES}
    before = runs(story)
    assert len(before) == 4, "a trainer that has ended, one that trains, an engine and a router"

    with Load(story.ready_url("teller"), "teller", lengths=(16, 160)) as load:
        story.more_answers(load, ENOUGH)
        install_again(previous)
        assert operator.image() == "localhost/stoker/control:e2e"
        story.apply(save_now("after", "train"))
        story.wait("Checkpoint", "after", is_verified, "verified under the new release")
        story.more_answers(load, ENOUGH)
    assert load.failures == []
    assert len(load.fingerprints) == 1
    assert runs(story) == before, "no pod was restarted or replaced"
    status = story.status("TrainingJob", "train")
    assert (status["attempt"]["number"], status.get("restarts", 0)) == (0, 0)

    story.apply(job("later", {"training.totalSteps": 20}))
    story.wait_for_phase("TrainingJob", "later", "Completed")
    assert images(story, "trainer", job="later") == {"localhost/stoker/runtime:e2e"}


def images(story: Story, *roles: str, **labels: str) -> set[str]:
    """Return the images of the pods with these roles."""
    pods = [pod for role in roles for pod in story.pods(role=role, **labels)]
    return {pod["spec"]["containers"][0]["image"].partition("@")[0] for pod in pods}


def is_verified(found: Object) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Verified" and one["status"] == "True" for one in conditions)
