"""Parts of a body that are written without a task, by a real server to real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stoker.pod.direct_body import DirectBody, direct_body
from stoker.pod.serve import Server, bind_tcp
from testing.scenario import run, until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PART = bytes(65536)

App = Callable[[Any, Any, Any, DirectBody], Awaitable[None]]


async def start(send: Any, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def end(send: Any, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body})


async def served(app: App, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Serve `app` to one client; what either asserts counts."""
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        found = direct_body(scope)
        assert found is not None
        try:
            assert not found.open  # no head yet
            await app(scope, receive, send, found)
        except BaseException as error:
            result.set_exception(error)
            raise
        result.set_result(None)

    server = Server(asgi, bind_tcp("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        await talk(reader, writer)
        await result
    finally:
        writer.close()
        await server.stop(0)


def test_direct_writes_and_sends_alternate() -> None:
    async def app(_scope: Any, _receive: Any, send: Any, direct: DirectBody) -> None:
        await start(send)
        assert direct.open
        direct.write(b"a")
        await send({"type": "http.response.body", "body": b"b", "more_body": True})
        direct.write(b"c")
        await end(send)
        assert not direct.open

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await reader.readuntil(b"0\r\n\r\n") == b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"

    run(lambda: served(app, talk))


def test_a_body_with_a_length_and_an_answer_to_head_are_not_written_directly() -> None:
    async def app(_scope: Any, _receive: Any, send: Any, direct: DirectBody) -> None:
        await start(send, (b"content-length", b"1"))
        assert not direct.open
        await end(send, b"a")

    async def head(_scope: Any, _receive: Any, send: Any, direct: DirectBody) -> None:
        await start(send, (b"transfer-encoding", b"chunked"))
        assert not direct.open
        await end(send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\na")

    async def talk_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HEAD" + GET[3:])
        await reader.readuntil(b"\r\n\r\n")

    run(lambda: served(app, talk))
    run(lambda: served(head, talk_head))


def test_it_closes_for_a_slow_client_until_that_has_read() -> None:
    written = 0
    full = asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any, direct: DirectBody) -> None:
        nonlocal written
        await start(send)
        while direct.open:
            assert written < 2000  # 125 MiB: no buffer of a kernel is so large
            direct.write(PART)
            written += 1
        full.set()
        await until(lambda: direct.open)
        await end(send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        await full.wait()
        got = await reader.readuntil(b"\r\n\r\n")
        while not got.endswith(b"0\r\n\r\n"):
            got = got[-5:] + await reader.read(1 << 20)

    run(lambda: served(app, talk))
    assert written


def test_it_closes_when_the_client_leaves() -> None:
    async def app(_scope: Any, receive: Any, send: Any, direct: DirectBody) -> None:
        await start(send)
        assert direct.open
        while (await receive())["type"] != "http.disconnect":
            pass
        assert not direct.open

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    run(lambda: served(app, talk))


def test_another_server_has_none() -> None:
    assert direct_body({"type": "http"}) is None
