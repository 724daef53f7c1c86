"""The stories' cluster with Kueue's own controller, which the charts find when they are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.charts.release import Releases
from e2e.cluster.cluster import Cluster
from e2e.cluster.foreign_controllers import kueue, running
from e2e.stories.conftest import cluster, story
from e2e.stories.installation import installed

__all__ = ["cluster", "story"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these stories out where there can be no nodes; allow more time, because the first one builds images."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skipif(os.geteuid() != 0, reason="nodes need root"))
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def releases(cluster: Cluster) -> Iterator[Releases]:
    """Both charts, installed after Kueue; it goes last, because its objects go through it."""
    with running(cluster.plane, kueue(cluster.plane)), installed(cluster) as found:
        yield found
