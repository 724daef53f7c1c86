"""A control plane with Flux's own kustomize-controller for all tests of this folder; a namespace for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.api.conftest import new_world, plane, run
from e2e.api.plane import Plane
from e2e.cluster.foreign_controllers import kustomize_controller, running

__all__ = ["new_world", "plane", "run"]


@pytest.fixture(scope="session")
def with_flux(plane: Plane) -> Iterator[Plane]:
    """The control plane while Flux works on it."""
    with running(plane.control_plane, kustomize_controller(plane.control_plane)):
        yield plane
