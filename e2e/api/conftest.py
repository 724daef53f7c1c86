"""etcd and kube-apiserver alone for all tests, a namespace for each.

The programs must be there: without them every test is an error that names the remedy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.api.plane import Plane
from e2e.api.world import NewWorld, Story, world
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established

CRDS = Path(__file__).parents[2] / "crds"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A control plane with the product's CRDs."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("control-plane"), "api-tests")
    control_plane.start()
    try:
        found = Plane(control_plane)
        found.kubectl("apply", "--server-side", "-f", str(CRDS))
        wait_until_established(found.kubectl, "-f", str(CRDS))
        yield found
    finally:
        control_plane.stop()


@pytest.fixture
def namespace(plane: Plane) -> str:
    """A new, empty namespace without a kubelet."""
    name = f"test-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def new_world(plane: Plane, tmp_path: Path) -> NewWorld:
    """A factory of surroundings with a namespace of their own: `async with new_world() as world`."""
    return lambda: world(plane, f"test-{next(_numbers)}", tmp_path)


@pytest.fixture
def run(new_world: NewWorld) -> Callable[[Story], None]:
    """A function that runs a story in new surroundings."""

    async def whole(story: Story) -> None:
        async with new_world() as found:
            await story(found)

    return lambda story: asyncio.run(whole(story))
