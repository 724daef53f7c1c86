"""A connection to a backend over a transport that the test moves: waiting, silence, back-pressure, sinks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.router.connection import MAX_HELD_BYTES, Broken, Connection, Outgoing, Silent, Unreachable
from testing.scenario import run

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
REQUEST = Outgoing("POST", b"/v1/x", (), b"body")


class Transport(asyncio.Transport):
    """Keeps what was written, and whether it reads."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection, self.written, self.reads, self.closed = connection, b"", True, False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Kept:
    """A sink that keeps parts while it is open."""

    def __init__(self) -> None:
        self.open, self.parts = True, list[bytes]()
        self.failure: Exception | None = None

    def add(self, part: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.parts.append(part)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def begun() -> tuple[Connection, Transport]:
    """A connection whose answer has begun."""
    connection = Connection("host:1")
    transport = Transport(connection)
    connection.connection_made(transport)
    asking = asyncio.create_task(connection.exchange(REQUEST, 60))
    await asyncio.sleep(0)
    connection.data_received(HEAD)
    assert (await asking).status == 200
    return connection, transport


async def waiting(connection: Connection, sink: Kept | None = None, silence_s: float = 60) -> asyncio.Task[bytes]:
    """A read that waits."""
    reading = asyncio.create_task(connection.read(silence_s, sink))
    await asyncio.sleep(0)
    assert not reading.done()
    return reading


def test_parts_that_arrive_together_are_one() -> None:
    async def scenario() -> None:
        connection, transport = await begun()
        assert transport.written == b"POST /v1/x HTTP/1.1\r\nhost: host:1\r\ncontent-length: 4\r\n\r\nbody"
        connection.data_received(chunk(b"a") + chunk(b"b") + b"3\r\nc")
        assert await connection.read(60) == b"abc"
        reading = await waiting(connection)
        connection.data_received(b"de\r\n" + END)
        assert await reading == b"de"
        assert await connection.read(60) == b""
        connection.finish()
        assert connection.reusable
        connection.eof_received()
        assert not connection.reusable

    run(scenario)


def test_what_came_before_the_end_is_read_before_the_break() -> None:
    async def scenario() -> None:
        connection, _ = await begun()
        connection.data_received(chunk(b"a"))
        connection.connection_lost(ConnectionResetError("reset by peer"))
        assert await connection.read(60) == b"a"
        with pytest.raises(Broken, match="reset by peer"):
            await connection.read(60)

    run(scenario)


def test_a_connection_that_is_cut_here_wakes_its_reader() -> None:
    """Also where the end of the connection would end the body."""

    async def scenario() -> None:
        connection = Connection("host:1")
        connection.connection_made(Transport(connection))
        asking = asyncio.create_task(connection.exchange(REQUEST, 60))
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\npart")
        await asking
        assert await connection.read(60) == b"part"
        reading = await waiting(connection)
        connection.close()
        with pytest.raises(Broken, match="closed here"):
            await reading
        with pytest.raises(Unreachable, match="closed here"):
            await connection.exchange(REQUEST, 60)

    run(scenario)


def test_silence_ends_a_read_and_bytes_put_it_off() -> None:
    async def scenario() -> None:
        connection, _ = await begun()
        sink, silence_s = Kept(), 0.05
        loop = asyncio.get_running_loop()
        reading = await waiting(connection, sink, silence_s)
        until = loop.time() + 3 * silence_s
        while loop.time() < until:  # each turn of the loop comes before the timers that are due in it
            connection.data_received(chunk(b"a"))
            await asyncio.sleep(0)
        assert not reading.done()
        assert len(sink.parts) > 3
        with pytest.raises(Silent, match=r"nothing came for 0\.05 s"):
            await reading
        with pytest.raises(Silent, match=r"nothing came for 0\.01 s"):
            await connection.read(0.01)

    run(scenario)


def test_a_shorter_limit_replaces_a_longer_one() -> None:
    async def scenario() -> None:
        connection, _ = await begun()
        reading = await waiting(connection, silence_s=600)
        connection.data_received(chunk(b"a"))
        assert await reading == b"a"
        with pytest.raises(Silent):
            await connection.read(0.01)

    run(scenario)


def test_a_reader_that_is_slow_holds_the_backend_back() -> None:
    async def scenario() -> None:
        connection, transport = await begun()
        part = bytes(MAX_HELD_BYTES)
        connection.data_received(chunk(part))
        assert transport.reads
        connection.data_received(chunk(b"a"))
        assert not transport.reads
        assert await connection.read(60) == part + b"a"
        assert transport.reads

    run(scenario)


def test_a_sink_gets_parts_while_it_is_open_and_the_reader_the_others() -> None:
    async def scenario() -> None:
        connection, transport = await begun()
        sink = Kept()
        connection.data_received(chunk(b"a"))
        assert await connection.read(60, sink) == b"a"  # it was there already
        reading = await waiting(connection, sink)
        connection.data_received(chunk(b"b"))
        connection.data_received(b"2\r\nc")
        await asyncio.sleep(0)
        assert sink.parts == [b"b", b"c"]
        assert not reading.done()
        sink.open = False
        connection.data_received(b"d\r\n")
        connection.data_received(chunk(b"e"))
        assert await reading == b"de"
        connection.data_received(chunk(bytes(MAX_HELD_BYTES + 1)))
        assert not transport.reads  # no read waits: a sink gets nothing either
        assert len(await connection.read(60, sink)) == MAX_HELD_BYTES + 1
        sink.open = True
        reading = await waiting(connection, sink)
        connection.data_received(chunk(b"f") + END)
        assert await reading == b""
        assert sink.parts == [b"b", b"c", b"f"]

    run(scenario)


def test_a_sink_that_fails_ends_the_read_with_its_error() -> None:
    async def scenario() -> None:
        connection, _ = await begun()
        sink = Kept()
        sink.failure = RuntimeError("no room")
        reading = await waiting(connection, sink)
        connection.data_received(chunk(b"a"))
        connection.data_received(chunk(b"b"))
        with pytest.raises(RuntimeError, match="no room"):
            await reading

    run(scenario)
