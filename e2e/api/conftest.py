"""etcd and kube-apiserver alone for all tests, a namespace for each. The programs must be there: without them every test is an error that says how to get them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.api.access import read_kubeconfig
from e2e.api.api_client import ApiClient
from e2e.api.plane import Plane
from e2e.cluster.control_plane import ControlPlane

CRDS = Path(__file__).parents[2] / "crds"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A control plane with our CRDs."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("control-plane"), "api-tests")
    control_plane.start()
    try:
        found = Plane(control_plane)
        found.kubectl("apply", "--server-side", "-f", str(CRDS))
        found.kubectl("wait", "--for=condition=Established", "--timeout=20s", "-f", str(CRDS))
        yield found
    finally:
        control_plane.stop()


@pytest.fixture
def namespace(plane: Plane) -> str:
    """A new namespace in which pods may be made."""
    name = f"test-{next(_numbers)}"
    asyncio.run(_make_namespace(plane, name))
    return name


async def _make_namespace(plane: Plane, name: str) -> None:
    async with ApiClient(read_kubeconfig(plane.kubeconfig)) as api:
        await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
        await api.create(account)
