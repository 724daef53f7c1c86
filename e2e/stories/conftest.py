"""The shared parts of the stories: one cluster with the product installed, and a namespace for each story."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from e2e.charts.release import Releases
from e2e.cluster.cluster import Cluster
from e2e.images.build import build_images
from e2e.images.recipe import ALL
from e2e.stories.installation import NODES, installed
from e2e.stories.story import Story
from e2e.upgrade.previous import recipes

KEPT_VARIABLE = "STOKER_E2E_CLUSTER"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow more time: the first story also builds images and starts the cluster."""
    for item in items:
        if "e2e/stories" in str(item.path):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a control node and two nodes with GPUs, the images of this checkout in their stores.

    The previous release's are there, too, where the checkout has its history.

    For work on a story, `STOKER_E2E_CLUSTER=NAME` keeps a cluster of that name running after the tests and reuses it
    the next time.
    """
    kept = os.environ.get(KEPT_VARIABLE)
    running = Cluster(kept or "stories", NODES, detached=bool(kept))
    if not (kept and running.running):
        build_images((*ALL, *recipes(tmp_path_factory.mktemp("previous") / "checkout")))
        running.up()
    yield running
    if not kept:
        running.down()


@pytest.fixture(scope="session")
def releases(cluster: Cluster) -> Iterator[Releases]:
    """Both charts, installed; after the last story every namespace of a story is gone."""
    with installed(cluster) as found:
        yield found


@pytest.fixture
def story(releases: Releases, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Story]:
    """An empty namespace.

    After the story its objects are gone, and lost or added nodes are as before.
    """
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    found = Story(cluster, words[:40].strip("-"))
    found.begin()
    try:
        yield found
        found.end()
    finally:
        found.close()
        restore_nodes(cluster)


def restore_nodes(cluster: Cluster) -> None:
    """Restore the cluster's nodes as they were at its start, all of them Ready and schedulable."""
    wanted = {spec.name: spec for spec in NODES}
    for name in cluster.nodes.keys() - wanted.keys():
        cluster.remove_node(name)
    for name, spec in wanted.items():
        node = cluster.nodes.get(name)
        if node is None or not node.alive:
            cluster.add_node(spec)
    cluster.kubectl("uncordon", *wanted)
