"""A control plane without nodes for the charts: admission, access rights and upgrades."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.charts.release import Releases
from e2e.cluster.control_plane import ControlPlane


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    """Helm and kubectl on an API server of its own with nothing installed."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), "charts") as plane:
        yield Releases(Path(plane.kubeconfig))
