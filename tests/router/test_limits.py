"""The router as a program under clients that send without end: its memory stays bounded, and others are served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.router.fake_engine import FakeEngine
from testing.router.harness import run, snapshot, until
from tests.router.test_main import program, wait_for_backends, write_config

MIB = 2**20
LONGEST_S = 240.0
"""Longest wait for an answer; a busy machine is slow."""


def memory_mib(pid: int) -> float:
    """Return the most memory that a process has had so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


class Router:
    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        self.process, self.http, self.engine = process, http, engine
        self.port = http.base_url.port
        self.before = memory_mib(process.pid)

    @property
    def growth_mib(self) -> float:
        return memory_mib(self.process.pid) - self.before

    async def connect_socket(self) -> socket.socket:
        """Open a plain socket: a transport would throw away an answer that lies in the kernel when a send fails."""
        made = socket.socket()
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self.port))
        return made

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def router(folder: Path, **settings: Any) -> AsyncIterator[Router]:
    config = write_config(folder, **settings)
    engine = await FakeEngine("a").start()
    (folder / "backends.json").write_text(json.dumps(snapshot(1, engine.entry())))
    try:
        async with program(config) as (process, client):
            await wait_for_backends(client, 1)
            assert (await client.get("/v1/models")).status_code == 200
            yield Router(process, client, engine)
            assert (await client.get("/v1/models")).status_code == 200
            assert process.returncode is None
    finally:
        engine.kill()


async def send_until_closed(client: socket.socket, begin: bytes, part: bytes, number: int) -> bytes:
    """Send `begin`, then `part` again and again, until an answer comes or the server closes; return the answer."""
    loop = asyncio.get_running_loop()

    async def send() -> None:
        with suppress(OSError):
            await loop.sock_sendall(client, begin)
            for _ in range(number):
                await loop.sock_sendall(client, part)

    sending = asyncio.ensure_future(send())
    try:
        async with asyncio.timeout(LONGEST_S):
            return await loop.sock_recv(client, 4096)  # what was sent before a reset can be read after it
    except ConnectionError:
        return b""  # closed without an answer
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        client.close()


@pytest.mark.parametrize(
    ("begin", "part", "number", "status"),
    [
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", b"A: aaaaaaaa\r\n" * 5000, 1000, 431, id="headers"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: ", b"a" * 65536, 1000, 431, id="one header"),
        pytest.param(b"GET /v1/models?", b"a" * 65536, 1000, 414, id="URL"),
    ],
)
def test_an_endless_head_is_refused_and_takes_no_memory(
    tmp_path: Path, begin: bytes, part: bytes, number: int, status: int
) -> None:
    async def scenario() -> None:
        async with router(tmp_path) as r:
            answer = await send_until_closed(await r.connect_socket(), begin, part, number)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert r.growth_mib < 30

    run(scenario)


def test_pipelined_requests_take_no_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with router(tmp_path) as r:
            part = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
            clients = [await r.connect_socket() for _ in range(20)]
            await asyncio.gather(*(send_until_closed(client, b"", part, 10) for client in clients))
            assert r.growth_mib < 60

    run(scenario)


def test_bodies_in_flight_are_bounded_and_the_router_recovers(tmp_path: Path) -> None:
    """40 connections stop at 3.5 of 4 MiB, which would be 140 MiB if all were kept."""
    limits = {"max_body_bytes_in_flight": 12 * MIB}

    async def scenario() -> None:
        async with router(tmp_path, max_body_bytes=4 * MIB, listen={"limits": limits}) as r:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (4 * MIB)
            streams = [await r.connect() for _ in range(40)]
            for _, writer in streams:
                writer.write(head)
            for _ in range(7 * 8):
                for _, writer in streams:
                    if not writer.is_closing():
                        writer.write(b"x" * 65536)
                await asyncio.sleep(0.005)
            refused: list[bytes] = []
            reading = [asyncio.ensure_future(_first(reader, refused)) for reader, _ in streams]
            await until(lambda: len(refused) >= 30)  # the others wait for the rest of their bodies
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            assert all(answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer for answer in refused)
            assert r.growth_mib < 90
            for _, writer in streams:
                writer.transport.abort()
            await _answers(r, b"x" * (4 * MIB), 200)  # all of the budget is back

    run(scenario)


async def _first(reader: asyncio.StreamReader, answers: list[bytes]) -> None:
    """Add what the server answers before it closes."""
    with suppress(ConnectionError):
        if answer := await reader.read(4096):
            answers.append(answer)


async def _answers(r: Router, body: bytes, status: int) -> None:
    async with asyncio.timeout(LONGEST_S):
        while (await r.http.post("/v1/completions", content=body)).status_code != status:
            await asyncio.sleep(0.05)


def test_a_request_without_a_backend_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with router(tmp_path) as r:
            r.engine.ready = False
            await _answers(r, b"", 503)
            reader, writer = await r.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(4096), LONGEST_S)).startswith(b"HTTP/1.1 503 ")
            writer.transport.abort()
            r.engine.ready = True
            await wait_for_backends(r.http, 1)

    run(scenario)


def test_slow_clients_are_ended_while_others_are_served(tmp_path: Path) -> None:
    limits = {"head_timeout_s": 2, "body_timeout_s": 2}

    async def scenario() -> None:
        async with router(tmp_path, listen={"limits": limits}) as r:
            streams = []
            for number in range(100):
                reader, writer = await r.connect()
                end = b"\r\n" if number % 2 else b""
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n" + end)
                streams.append((reader, writer))
            assert (await r.http.get("/v1/models")).status_code == 200
            answers = await asyncio.gather(*(asyncio.wait_for(reader.read(), LONGEST_S) for reader, _ in streams))
            assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
            for _, writer in streams:
                writer.close()

    run(scenario)


def test_the_answer_has_one_date_and_an_id_of_bounded_length(tmp_path: Path) -> None:
    async def dated(exchange: Any) -> None:
        await exchange.json({"id": exchange.headers["x-request-id"]}, 200, date="Sat, 01 Jan 2000 00:00:00 GMT")

    async def scenario() -> None:
        async with router(tmp_path) as r:
            r.engine.behaviour = dated
            answer = await r.http.get("/v1/models", headers={"x-request-id": "mine"})
            assert answer.json() == {"id": "mine"}
            assert len(answer.headers.get_list("date")) == 1
            assert "2000" not in answer.headers["date"]
            for wrong in (b"a" * 129, b"a b", b"\xc3\xa4"):
                own = (await r.http.get("/v1/models", headers={b"x-request-id": wrong})).headers["x-request-id"]
                assert re.fullmatch(r"req-[0-9a-f]{32}", own)

    run(scenario)


def test_process_metrics_and_http_sizes_are_exposed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with router(tmp_path) as r:
            await r.http.post("/v1/completions", content=b"x" * 1000)
            text = (await r.http.get("/metrics")).text
            assert "process_resident_memory_bytes" in text
            assert "http_request_size_bytes_sum 1000.0" in text
            assert "http_response_size_bytes_count 2.0" in text

    run(scenario)
