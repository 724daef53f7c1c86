"""A gang of four pods under an operator that may not look at nodes: affinity and the cluster's scheduler keep it in one
rack, and the job says what that cannot give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.charts.helm import NAMESPACE, STOKER
from e2e.charts.release import Releases
from e2e.cluster.spec import NodeSpec
from e2e.stories.installation import RACK, VALUES
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

MORE = (
    NodeSpec(name="node-c", gpus=4, labels={RACK: "rack-0"}),
    NodeSpec(name="node-d", gpus=4, labels={RACK: "rack-1"}),
)
"""With the cluster's own two nodes: two racks of two nodes, each with room for one gang."""
RACKS = {"node-a": "rack-0", "node-b": "rack-1", **{spec.name: spec.labels[RACK] for spec in MORE}}
LEVELS = [{"key": "kubernetes.io/hostname"}, {"key": RACK}, {"key": RACK, "mode": "Required"}]
GANG = {
    "workers.replicas": 4,
    "workers.gpusPerPod": 2,
    "workers.ranksPerPod": 1,
    "runtime.device": "cpu",
    "training.microBatchSize": 1,
    "training.totalSteps": 1_000_000,
    "scheduling.topology": LEVELS,
}


@pytest.fixture
def blind(releases: Releases, story: Story) -> Iterator[Releases]:
    """The operator without the right to look at nodes, in two racks of two nodes."""
    upgrade(releases, {"watch": {"nodes": False}})
    try:
        for spec in MORE:
            story.cluster.add_node(spec)
        yield releases
    finally:
        upgrade(releases, {})


def upgrade(releases: Releases, values: dict[str, Any]) -> None:
    releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values={**VALUES, **values})


def test_gangs_stay_in_one_rack_each_without_a_view_of_nodes(blind: Releases, story: Story) -> None:
    assert not blind.may(f"{NAMESPACE}:stoker", "list", "nodes")
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("first", GANG))
    first = racks_of(story, "first")
    assert len(first) == 1
    told = story.wait("TrainingJob", "first", limits, "the job says what affinity lacks")
    [(reason, text)] = limits(told)
    assert reason == "NoNodes"
    assert "some may start while others find no room" in text

    story.apply(job("second", GANG))
    assert racks_of(story, "second") == set(RACKS.values()) - first, "its first pod goes where there is room"

    story.apply(job("third", GANG))
    waiting = story.wait("TrainingJob", "third", lambda found: "4 of 4 pods wait" in message(found), "no room is left")
    assert "lack nvidia.com/gpu" in message(waiting)
    story.delete("TrainingJob", "first")
    assert racks_of(story, "third") == first


def racks_of(story: Story, name: str) -> set[str]:
    """The racks of a gang, once each of its pods has a node."""
    nodes: list[str] = []

    def bound() -> bool:
        nodes[:] = [pod["spec"]["nodeName"] for pod in story.pods(job=name) if pod["spec"].get("nodeName")]
        return len(nodes) == GANG["workers.replicas"]

    story.wait_until(bound, f"{name} has its nodes")
    return {RACKS[node] for node in nodes}


def limits(found: Object) -> list[tuple[str, str]]:
    """Reason and message of the condition that names what a placement lacks."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return [(one["reason"], one["message"]) for one in conditions if one["type"] == "PlacementLimited"]


def message(found: Object) -> str:
    return str((found.get("status") or {}).get("message"))
