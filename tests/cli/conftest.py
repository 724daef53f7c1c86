"""A cluster behind a real port, shared by the tests of the verbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.gateway.kube_server import KubeServer, kube_server
from testing.gateway.verbs import emptied


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    with kube_server(tmp_path_factory.mktemp("kube")) as found:
        yield found


@pytest.fixture
def server(shared: KubeServer) -> Iterator[KubeServer]:
    """A server without objects."""
    yield shared
    shared.do(emptied)
