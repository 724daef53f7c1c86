"""Requests to an API server: a failure on the way is the interface's error, and the next request starts afresh."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import certifi
import pytest

from stoker.operator.cluster.interface import ClusterError
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.kube.service_account import ServiceAccount
from stoker.operator.cluster.kube.session import proxy_of_environment
from stoker.operator.domain.clock import SystemClock


def kubeconfig(folder: Path, authority: Path | None, server: str = "https://127.0.0.1:1", **user: str) -> Access:
    """Return the kubeconfig of a server (by default of none), with its certificates' authority in a file."""
    file = folder / "kubeconfig"
    cluster = {"server": server, **({"certificate-authority": str(authority)} if authority else {})}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
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
        with pytest.raises(ClusterError, match="cannot connect"):
            await connection.request("GET", "/version", resource="version")
        await connection.close()

    asyncio.run(story())


def test_a_server_that_does_not_answer_is_told_with_the_time_that_was_waited(tmp_path: Path) -> None:
    async def story(server: socket.socket) -> None:
        access = kubeconfig(tmp_path, None, f"http://127.0.0.1:{server.getsockname()[1]}")
        connection = ApiConnection(access, RateLimit(SystemClock(), per_second=100, burst=100))
        with pytest.raises(ClusterError, match=r"GET /version: no whole answer in 0\.05 s$"):
            await connection.request("GET", "/version", resource="version", timeout_s=0.05)
        await connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts nothing
        asyncio.run(story(server))


def test_a_closed_connection_opens_again(tmp_path: Path) -> None:
    async def story() -> None:
        connection = ApiConnection(
            kubeconfig(tmp_path, Path(certifi.where())), RateLimit(SystemClock(), per_second=100, burst=100)
        )
        for _ in range(2):
            with pytest.raises(ClusterError, match="cannot connect"):
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
def test_the_proxy_is_that_of_the_environment_unless_it_makes_an_exception(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_of_environment("https://127.0.0.1:6443") == proxy


def test_a_request_carries_its_body_as_json_and_the_newest_token(tmp_path: Path) -> None:
    """Requests reach a server as they were asked for; the token of a kubeconfig is in each."""
    heads: list[str] = []
    bodies: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = [line.partition(":")[2] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        heads.append(head)
        bodies.append(json.loads(await reader.readexactly(int(sizes[0]))) if sizes else None)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\n{"a":1}')
        await writer.drain()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        access = kubeconfig(tmp_path, None, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="t")
        connection = ApiConnection(access, RateLimit(SystemClock(), per_second=100, burst=100))
        body, kind = {"spec": {"text": "Übung"}}, "application/merge-patch+json"
        query = {"fieldManager": "m"}
        found = await connection.request("PATCH", "/x", resource="x", query=query, body=body, content_type=kind)
        assert found == {"a": 1}
        await connection.request("GET", "/y", resource="y")
        await connection.close()
        server.close()
        await server.wait_closed()

    asyncio.run(story())
    first, second = (head.lower().split("\r\n") for head in heads)
    assert first[0] == "patch /x?fieldmanager=m http/1.1"
    assert {"content-type: application/merge-patch+json", "authorization: bearer t"} <= {*first}
    assert second[0] == "get /y http/1.1"
    assert bodies == [{"spec": {"text": "Übung"}}, None]


def service_account(folder: Path, token: str = "first") -> Path:
    (folder / "token").write_text(f"{token}\n")
    (folder / "ca.crt").write_text(Path(certifi.where()).read_text())
    return folder


IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_a_service_account_gives_address_certificate_and_a_token_that_is_read_again(tmp_path: Path) -> None:
    now = 0.0

    def token(found: ServiceAccount) -> str:
        return asyncio.run(found.auth_settings())["BearerToken"]["value"]

    found = ServiceAccount(service_account(tmp_path), environment=IN_A_POD, clock=lambda: now)
    assert (found.host, found.ssl_ca_cert) == ("https://10.96.0.1:443", str(tmp_path / "ca.crt"))
    service_account(tmp_path, "second")
    now = 59.0
    assert token(found) == "Bearer first"
    now = 60.0
    assert token(found) == "Bearer second"
    six = ServiceAccount(tmp_path, environment={**IN_A_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert six.host == "https://[fd00::1]:443"


def test_a_service_account_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"ca\.crt"):
        ServiceAccount(tmp_path, environment=IN_A_POD)
    service_account(tmp_path, "")
    with pytest.raises(ValueError, match="token is empty"):
        ServiceAccount(tmp_path, environment=IN_A_POD)
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_PORT is missing"):
        ServiceAccount(tmp_path, environment={"KUBERNETES_SERVICE_HOST": "x"})


def test_an_operator_in_a_pod_does_not_load_the_client_library() -> None:
    """It takes 12 MB, and CEL 8 more."""
    code = "import sys, stoker.operator.service.program; print({'kubernetes', 'cel_expr_python'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
