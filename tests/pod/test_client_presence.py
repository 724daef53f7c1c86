"""Work that ends with its client: by a real server to real sockets, and under a server that only sends messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stoker.pod.client_presence import while_present
from stoker.pod.serve import Server, bind_tcp
from testing.scenario import run, until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def answer(send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Watched:
    """An application; the first request waits until it is released or cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.ended: list[bool] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()  # the body
        self.ended.append(await while_present(self._work(send), scope, receive))

    async def _work(self, send: Any) -> None:
        self.begun += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await answer(send)


async def served(requests: int, talk: Callable[[Watched, asyncio.StreamReader, asyncio.StreamWriter], Any]) -> Watched:
    app = Watched()
    server = Server(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET * requests)
    try:
        await until(lambda: app.begun == 1)
        await talk(app, reader, writer)
        await until(lambda: bool(app.ended))
    finally:
        writer.close()
        await server.stop(0)
    return app


@pytest.mark.parametrize("requests", [1, 3], ids=["one request", "three sent ahead"])
def test_work_is_cancelled_when_its_client_leaves(requests: int) -> None:
    async def talk(_app: Watched, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def check() -> None:
        app = await served(requests, talk)
        assert (app.begun, app.cancelled, app.ended) == (1, 1, [False])

    run(check)


def test_work_comes_to_its_end_while_the_client_is_there_and_the_connection_serves_the_next_request() -> None:
    async def talk(app: Watched, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.release.set()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")

    async def check() -> None:
        app = await served(1, talk)
        assert (app.begun, app.cancelled, app.ended) == (2, 0, [True, True])

    run(check)


def test_a_server_that_stops_is_no_client_that_leaves() -> None:
    async def check() -> None:
        app = Watched()
        server = Server(app, bind_tcp("127.0.0.1", 0))
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET)
        await until(lambda: app.begun == 1)
        await server.stop(1)
        await until(lambda: app.cancelled == 1)
        assert app.ended == []
        writer.close()

    run(check)


def test_under_another_server_it_waits_for_the_message() -> None:
    async def check() -> None:
        app, left = Watched(), asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        serving = asyncio.create_task(while_present(app._work(send), {"type": "http"}, receive))
        await until(lambda: app.begun == 1)
        left.set()
        assert await serving is False
        assert app.cancelled == 1

        left.clear()
        app.release.set()
        assert await while_present(app._work(send), {"type": "http"}, receive) is True

    run(check)
