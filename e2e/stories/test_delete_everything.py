"""Story 9: everything is deleted, then uninstalled.

No object of the product is left in the cluster; data stays unless the policy is Delete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.charts.helm import NAMESPACE
from e2e.charts.release import Releases
from e2e.stories.installation import install
from e2e.stories.story import OURS, Story
from testing.stories.manifests import claim, corpus, deployment, job, save_now

RUN = {"training.totalSteps": 60, "checkpoint.intervalSteps": 20}


@pytest.fixture
def installed(releases: Releases, story: Story) -> Iterator[Releases]:
    """Install the charts again after the story, for those that follow."""
    yield releases
    install(story.cluster)


def test_nothing_is_left_but_the_data(story: Story, installed: Releases) -> None:
    chat = deployment("teller", {"checkpointSelector": {"jobRef": {"name": "train"}}})
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("train", RUN), chat)
    story.apply(save_now("by-hand", "train", deletionPolicy="Delete"))
    story.wait_for_phase("TrainingJob", "train", "Completed")
    story.wait_for_phase("InferenceDeployment", "teller", "Serving")
    data = story.folder("checkpoints") / "train"
    by_hand = data / story.status("Checkpoint", "by-hand")["folder"]
    kept = {path for path in data.rglob("*") if by_hand not in (path, *path.parents)}
    assert by_hand.is_dir()
    assert story.left()

    story.kubectl("delete", ",".join(f"{kind}.stoker.dev".lower() for kind in OURS), "--all", "--timeout=300s")

    story.nothing_left()
    assert not by_hand.exists()
    assert set(data.rglob("*")) == kept
    assert len([path for path in kept if path.name == "manifest.json"]) == 3

    installed.uninstall("stoker", NAMESPACE)
    installed.uninstall("stoker-crds", NAMESPACE)
    assert len(installed.get("crd")["items"]) == 4, "definitions outlive the chart, and the objects with them"
    installed.kubectl("delete", "crd", "--all", "--timeout=300s")
    installed.kubectl("delete", "namespace", NAMESPACE, "--timeout=300s")
    assert ours_anywhere(installed) == []
    assert set(data.rglob("*")) == kept


def ours_anywhere(releases: Releases) -> list[str]:
    """Return every object of the cluster with the product's name, whatever its kind.

    The story's own namespace and events do not count.
    """
    kinds = releases.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    asked = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
    listed = json.loads(releases.kubectl("get", asked, "--all-namespaces", "-o", "json"))["items"]
    names = [f"{item['kind']}/{item['metadata'].get('namespace', '')}/{item['metadata']['name']}" for item in listed]
    return sorted(name for name in names if "stoker" in name)
