"""A zone whose node stays silent: first an outage that loses no pod, then the gang moves to the other zone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.charts.helm import NAMESPACE, STOKER
from e2e.charts.release import Releases
from e2e.stories.installation import VALUES
from e2e.stories.pair import PAIR
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

ZONE = "topology.kubernetes.io/zone"
EVERY = 25
RUN = {
    **PAIR,
    "training.totalSteps": 1_000_000,
    "checkpoint.intervalSteps": EVERY,
    "checkpoint.maxToKeep": 3,
}


@pytest.fixture
def zones(releases: Releases, story: Story) -> Iterator[None]:
    """Each node is a zone of its own, and one silent node is an outage of its zone that lasts 15 s."""
    limits = {**VALUES["workloads"], "nodeOutageNodes": 1, "zoneOutageSeconds": 15}
    upgrade(releases, limits)
    for name in ("a", "b"):
        story.cluster.kubectl("label", "node", f"node-{name}", f"{ZONE}=zone-{name}", "--overwrite")
    yield
    story.cluster.kubectl("label", "nodes", "--all", f"{ZONE}-")
    upgrade(releases, VALUES["workloads"])


def upgrade(releases: Releases, workloads: object) -> None:
    values = {**VALUES, "workloads": workloads}
    releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values=values)


@pytest.mark.usefixtures("zones")
def test_a_gang_moves_out_of_a_zone_that_stays_silent(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("hit", RUN))
    story.wait("TrainingJob", "hit", lambda found: saved(found) >= EVERY, "a verified save")
    (dead,) = {pod["spec"]["nodeName"] for pod in story.pods(job="hit")}

    story.cluster.kill_node(dead)

    silent = story.wait("TrainingJob", "hit", is_in_outage, "an outage of the zone")
    assert silent["status"]["attempt"]["number"] == 0, "no pod is lost in an outage"
    kept = saved(silent)
    moved = story.wait("TrainingJob", "hit", has_moved, "a save of the next attempt")
    assert {pod["spec"]["nodeName"] for pod in story.pods(job="hit", attempt=str(attempt(moved)))} == {
        "node-b" if dead == "node-a" else "node-a"
    }
    first = next(one for one in moved["status"]["attempts"] if one["number"] == 0)
    assert first["failure"]["node"] == dead
    assert first["failure"]["action"] == "RetryFree"
    assert moved["status"]["attempt"]["resumedFrom"]["step"] >= kept


def saved(found: Object) -> int:
    return int(((found.get("status") or {}).get("newestVerifiedCheckpoint") or {}).get("step", 0))


def attempt(found: Object) -> int:
    return int(((found.get("status") or {}).get("attempt") or {}).get("number", 0))


def has_moved(found: Object) -> bool:
    """Whether a later attempt runs and has saved: a save of the first attempt may be verified late."""
    if attempt(found) == 0 or found["status"]["phase"] != "Running":
        return False
    return saved(found) > int(found["status"]["attempt"]["resumedFrom"]["step"])


def is_in_outage(found: Object) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "NodesSilent" and one["status"] == "True" for one in conditions)
