"""A server's answers to clients that send too much, too slowly, or no HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from stoker.pod.asgi import BodyTooLarge, read_body
from stoker.pod.body_budget import BodyBudget
from stoker.pod.http_limits import HttpLimits
from stoker.pod.http_protocol import MAX_PIPELINED, SPARE_CONNECTIONS, RateLimitedWarning
from stoker.pod.serve import Server, bind_tcp

MAX_BODY = 100_000


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body's length; `/early` before it is read, `/slow` late."""
    status, size = 200, 0
    if scope["path"] != "/early":
        try:
            size = len(await read_body(receive, MAX_BODY, BodyBudget(10 * MAX_BODY).share()))
        except BodyTooLarge:
            status = 413
    if scope["path"] == "/slow":
        await asyncio.sleep(2.5)
    text = b"%d" % size
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def refusal(self) -> tuple[int, str]:
        """Return status and error code of an answer after which the server closes."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        assert await self.reader.read() == b""
        return status, json.loads(body)["error"]["code"]


Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def server(served: Any = app, **limits: Any) -> AsyncIterator[Connect]:
    made = Server(served, bind_tcp("127.0.0.1", 0), HttpLimits(**limits))
    await made.start()
    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", made.port)))
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.writer.transport.abort()
        await made.stop(1)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(limited())


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
END = b"\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        pytest.param(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n", 414, "url_too_long", id="long URL"),
        pytest.param(GET + b"A: " + b"a" * 40_000, 431, "head_too_large", id="long header"),
        pytest.param(GET + b"A" * 40_000, 431, "head_too_large", id="long header name"),
        pytest.param(b"\r\n" * 20_000, 431, "head_too_large", id="empty lines"),
        pytest.param(GET + b"A: a\r\n" * 101, 431, "too_many_headers", id="many headers"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400, "http_version", id="HTTP/2.0"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, "host_header", id="no Host"),
        pytest.param(GET + b"Host: y\r\n\r\n", 400, "host_header", id="two Hosts"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http", id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http", id="HTTP/2 preface"),
        pytest.param(
            GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "transfer_coding", id="unknown transfer coding"
        ),
        pytest.param(
            GET + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 415, "content_coding", id="gzip"
        ),
        pytest.param(
            GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400, "no_websocket", id="WebSocket"
        ),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab",
            400, "upgrade", id="upgrade with a body",
        ),
    ],
)  # fmt: skip
def test_a_head_that_is_too_large_or_not_http_1_1_is_refused(request_bytes: bytes, status: int, code: str) -> None:
    async def scenario() -> None:
        async with server() as connect:
            client = await connect()
            client.writer.write(request_bytes)
            assert await client.refusal() == (status, code)

    run(scenario)


def test_heads_within_the_limits_are_answered_however_they_are_cut() -> None:
    request = GET + b"".join(b"H%d: %s\r\n" % (n, b"v" * 200) for n in range(99)) + END

    async def scenario() -> None:
        async with server() as connect:
            client = await connect()
            for step in (1 << 20, 4096, 7):
                for start in range(0, len(request), step):
                    await client.send(request[start : start + step])
                assert (await client.answer())[0] == 200
            await client.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await client.answer())[0] == 200  # HTTP/1.0 needs no Host

    run(scenario)


@pytest.mark.parametrize("ahead", [b"", GET + END])
def test_a_client_of_http_1_0_gets_a_body_without_chunks(ahead: bytes) -> None:
    async def stream(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"data: 1\n\n", b"data: 2\n\n", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    async def scenario() -> None:
        async with server(stream) as connect:
            client = await connect()
            await client.send(ahead + b"GET / HTTP/1.0\r\n\r\n")
            if ahead:
                await client.reader.readuntil(b"\r\n0\r\n\r\n")
            head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
            assert (body, b"chunked" in head.lower()) == (b"data: 1\n\ndata: 2\n\n", False)

    run(scenario)


def test_a_content_encoding_that_changes_no_byte_is_served() -> None:
    async def scenario() -> None:
        async with server() as connect:
            client = await connect()
            await client.send(GET + b"Content-Encoding: gzip\r\n" + END)
            assert (await client.answer())[2] == b"0"
            await client.send(GET + b"Content-Encoding: Identity\r\nContent-Length: 2\r\n\r\nab")
            assert (await client.answer())[2] == b"2"

    run(scenario)


def test_an_empty_line_behind_a_body_does_not_end_the_answer() -> None:
    async def scenario() -> None:
        async with server(head_timeout_s=1) as connect:
            client = await connect()
            await client.send(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            await asyncio.sleep(0.2)
            await client.send(b"\r\n")
            assert (await client.answer())[0] == 200
            await client.send(GET + END)
            assert (await client.answer())[0] == 200

    run(scenario)


def test_blanks_behind_a_header_are_no_part_of_its_value() -> None:
    async def scenario() -> None:
        seen: list[Any] = []

        async def recording(scope: Any, receive: Any, send: Any) -> None:
            seen.append(dict(scope["headers"]))
            await app(scope, receive, send)

        async with server(recording) as connect:
            client = await connect()
            await client.send(GET + b"Authorization: Bearer a key \t\r\nEmpty: \r\n" + END)
            assert (await client.answer())[0] == 200
            assert (seen[0][b"authorization"], seen[0][b"empty"]) == (b"Bearer a key", b"")
            await client.send(
                b"POST" + GET[3:] + b"Transfer-Encoding: chunked \r\n" + END + b"3\r\nabc\r\n0\r\n\r\n" + GET + END
            )
            assert (await client.answer())[2] == b"3"
            assert (await client.answer())[2] == b"0", "the body ended where the client ended it"

    run(scenario)


def test_an_upgrade_to_http_2_is_ignored() -> None:
    async def scenario() -> None:
        async with server() as connect:
            client = await connect()
            await client.send(GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
            assert (await client.answer())[0] == 200

    run(scenario)


def test_requests_sent_ahead_are_answered_in_order_and_only_so_many_are_kept() -> None:
    async def scenario() -> None:
        async with server() as connect:
            client = await connect()
            await client.send((GET + END) * MAX_PIPELINED)
            assert [(await client.answer())[0] for _ in range(MAX_PIPELINED)] == [200] * MAX_PIPELINED
            greedy = await connect()
            await greedy.send((GET + END) * 2000)
            data = b""
            try:
                while part := await greedy.reader.read(65536):
                    data += part
            except ConnectionResetError:
                pass
            assert data.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1

    run(scenario)


def test_a_slow_head_and_a_slow_body_end_with_408_and_a_silent_connection_is_closed() -> None:
    async def scenario() -> None:
        async with server(head_timeout_s=1, body_timeout_s=1, min_body_bytes_per_s=1000) as connect:
            head, body, silent, steady = [await connect() for _ in range(4)]
            await head.send(b"GET / HTTP/1.1\r\nHo")
            await body.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
            await steady.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")

            async def trickle() -> None:
                for _ in range(6):  # slow, but faster than the least rate
                    await steady.send(b"x" * 10_000)
                    await asyncio.sleep(0.3)

            async def drip() -> None:
                for _ in range(100):  # each byte alone would keep a timeout between reads from ending
                    await asyncio.sleep(0.1)
                    head.writer.write(b"o")

            dripping = asyncio.ensure_future(drip())
            await asyncio.gather(trickle(), _expect(head, 408, "head_timeout"), _expect(body, 408, "body_timeout"))
            dripping.cancel()
            assert await silent.reader.read() == b""
            assert (await steady.answer())[0] == 200

    run(scenario)


async def _expect(client: Client, status: int, code: str) -> None:
    got, _, body = await client.answer()
    assert (got, json.loads(body)["error"]["code"]) == (status, code)


def test_an_idle_connection_is_closed() -> None:
    async def scenario() -> None:
        async with server(keep_alive_s=1, head_timeout_s=20) as connect:
            client = await connect()
            await client.send(GET + END)
            assert (await client.answer())[0] == 200
            assert await client.reader.read() == b""

    run(scenario)


def test_a_client_that_does_not_read_is_cut() -> None:
    size = 50_000_000

    async def scenario() -> None:
        cut = asyncio.Event()

        async def long(_scope: Any, _receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"%d" % size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until it is read, or cut
            cut.set()

        async with server(long, send_timeout_s=1) as connect:
            client = await connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(GET + END)
            await cut.wait()
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            with suppress(ConnectionResetError):
                assert len(await client.reader.read()) < size

    run(scenario)


def test_after_a_refused_body_the_rest_is_dropped_up_to_a_limit() -> None:
    async def scenario() -> None:
        async with server() as connect:
            for path in (b"/", b"/early"):
                client = await connect()
                await client.send(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" % path)
                await client.send(b"x" * 3_000_000)
                assert (await client.answer())[0] == (413 if path == b"/" else 200)
                await client.send(GET + END)  # the connection is as good as before
                assert (await client.answer())[0] == 200
                endless = await connect()
                with pytest.raises(ConnectionError):
                    await _send_without_end(endless, path)

    run(scenario)


async def _send_without_end(client: Client, path: bytes) -> None:
    await client.send(b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
    for _ in range(2000):
        await client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def test_beyond_the_limit_on_connections_only_probes_are_answered() -> None:
    async def scenario() -> None:
        async with server(max_connections=3) as connect:
            first = [await connect() for _ in range(3)]
            for client in first:
                await client.send(GET + END)
                assert (await client.answer())[0] == 200
            late, probe = await connect(), await connect()
            await late.send(GET + END)
            assert await late.refusal() == (503, "too_many_connections")
            await probe.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await probe.answer())[0] == 200
            more = [await connect() for _ in range(SPARE_CONNECTIONS + 5)]
            status, headers, _ = await more[-1].answer()
            assert (status, headers["retry-after"]) == (503, "1")
            for client in (*first, probe, *more):
                client.writer.transport.abort()
            await asyncio.sleep(0.1)
            again = await connect()
            await again.send(GET + END)
            assert (await again.answer())[0] == 200

    run(scenario)


def test_wrong_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with server() as connect:
            for request in (b"nonsense\r\n\r\n", GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"):
                for _ in range(20):
                    client = await connect()
                    await client.send(request)
                    assert (await client.answer())[0] == 400

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert len(caplog.records) == 1
    assert "uvicorn[standard]" not in caplog.text


def test_a_repeated_warning_is_counted() -> None:
    now = 0.0
    lines: list[str] = []
    logger = logging.Logger("test")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    warn = RateLimitedWarning(logger, lambda: now, interval_s=60)
    for now in (0.0, 1.0, 59.0, 60.0):  # noqa: B007 - the clock
        warn("x")
    assert lines == ["x", "x (2 more since the last message)"]
