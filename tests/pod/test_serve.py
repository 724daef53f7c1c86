"""The server that every program embeds."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.pod.serve import Server, bind_tcp, bind_unix


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def test_it_answers_on_a_free_port_without_nagle_delays_and_stops() -> None:
    async def scenario() -> None:
        bound = bind_tcp("127.0.0.1", 0)
        server = Server(hello, bound)
        assert bound.proto == socket.IPPROTO_TCP
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            assert (await client.get("/")).text == "hi"
        await server.stop(1)
        with pytest.raises(OSError, match=r"\[Errno"):
            socket.create_connection(("127.0.0.1", server.port if bound.fileno() >= 0 else 1), timeout=1)

    asyncio.run(scenario())


def test_a_taken_port_is_named() -> None:
    first = bind_tcp("127.0.0.1", 0)
    first.listen()
    with pytest.raises(OSError, match=f"127.0.0.1:{first.getsockname()[1]}: Address already in use"):
        bind_tcp("127.0.0.1", first.getsockname()[1])
    first.close()


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid:0: [A-Z]"):
        bind_tcp("no.such.host.invalid", 0)


def test_a_unix_socket_is_private_and_replaces_a_leftover(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    bind_unix(path).close()

    async def scenario() -> None:
        server = Server(hello, bind_unix(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await server.start()
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert (await client.get("/")).text == "hi"
        await server.stop(1)

    asyncio.run(scenario())
