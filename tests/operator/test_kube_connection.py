"""Requests to an API server: a failure on the way is the interface's error, and the next request starts afresh."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import certifi
import pytest

from stoker.operator.cluster.interface import ClusterError
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access, load_configuration
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.domain.clock import SystemClock


def kubeconfig(folder: Path, authority: Path) -> Access:
    """Return the kubeconfig of a server that does not exist, with its certificates' authority in a file."""
    file = folder / "kubeconfig"
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority": str(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    return Access(str(file))


def test_certificates_that_cannot_be_read_yet_are_read_by_the_next_request(tmp_path: Path) -> None:
    authority, whole = tmp_path / "ca.crt", Path(certifi.where()).read_text()
    authority.write_text("half written")

    async def story() -> None:
        connection = ApiConnection(kubeconfig(tmp_path, authority), RateLimit(SystemClock(), per_second=100, burst=100))
        with pytest.raises(ClusterError, match=r"GET /version: .*(certificate|PEM)"):
            await connection.request("GET", "/version", resource="version")
        authority.write_text(whole)
        with pytest.raises(ClusterError, match="Cannot connect"):
            await connection.request("GET", "/version", resource="version")
        await connection.close()

    asyncio.run(story())


def test_a_closed_connection_opens_again(tmp_path: Path) -> None:
    async def story() -> None:
        connection = ApiConnection(
            kubeconfig(tmp_path, Path(certifi.where())), RateLimit(SystemClock(), per_second=100, burst=100)
        )
        for _ in range(2):
            with pytest.raises(ClusterError, match="Cannot connect"):
                await connection.request("GET", "/version", resource="version")
            await connection.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "10.0.0.1,127.0.0.1"}, None),
        ({"http_proxy": "http://proxy:3128"}, None),
        ({}, None),
    ],
)
def test_the_proxy_of_the_environment_is_read_with_the_credentials_and_not_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = asyncio.run(load_configuration(kubeconfig(tmp_path, Path(certifi.where()))))
    assert found.proxy == proxy
    assert found.client_session_kwargs == {"trust_env": False}
