"""A control plane with Volcano's own scheduler for all tests of this folder; a namespace for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.api.conftest import new_world, plane, run
from e2e.api.plane import Plane
from e2e.cluster.foreign_controllers import running, volcano
from e2e.volcano.queues import open_queue

__all__ = ["new_world", "plane", "run"]


@pytest.fixture(scope="session")
def with_volcano(plane: Plane) -> Iterator[Plane]:
    """The control plane while Volcano works on it, with the queues that it makes."""
    with running(plane.control_plane, volcano(plane.control_plane)):
        for name in ("root", "default"):
            open_queue(plane, name)
        yield plane
