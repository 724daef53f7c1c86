"""The load for `router_stream`: an engine without a model, a client, and a relay that only copies bytes.

Each writes and reads where bytes arrive, without tasks, so that they leave the cores to the router. Engine and relay
are processes of their own: `python -m bench.router_load engine|relay ...` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, cast

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-stoker-resume: 1\r\n\r\n"
STATUS = b'{"pod_uid": "a", "phase": "Serving"}'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BODY = json.dumps({"stream": True, "messages": [{"role": "user", "content": "word " * 200}]}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@dataclass(frozen=True)
class Settings:
    streams_per_s: float
    chunks: int
    gap_s: float
    seconds: float
    spread: bool = False
    """Streams begin at random times. Otherwise as many times a second as an engine steps: all chunks come at once."""


def event(number: int, sent_s: float) -> bytes:
    """One update of a stream, framed, with the time of its writing."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1,
        "model": "m", "system_fingerprint": None, "choices": [choice], "sent": "@", "stoker": {"tokens": [number]},
    }  # fmt: skip
    text = json.dumps(chunk, separators=(",", ":")).replace('"@"', f"{sent_s:.9f}")
    return b"data: %s\n\n" % text.encode()


class Engine(asyncio.Protocol):
    """One connection: each POST is answered with a stream of chunks that hold the time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._input = b""
        self._before, _, self._behind = event(0, 0.0).partition(b"0.000000000")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._input += data
        while (at := self._input.find(b"\r\n\r\n")) >= 0:
            head = self._input[:at].lower()
            length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line), 0)
            if len(self._input) < at + 4 + length:
                return
            self._input = self._input[at + 4 + length :]
            if head.startswith(b"post"):
                self._transport.write(HEAD)
                self._step(0, time.monotonic())
            else:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(STATUS), STATUS))

    def _step(self, number: int, begun_s: float) -> None:
        if self._transport.is_closing():
            return
        if number == self._settings.chunks:
            self._transport.write(END)
            return
        text = b"%b%.9f%b" % (self._before, time.monotonic(), self._behind)
        self._transport.write(b"%x\r\n%b\r\n" % (len(text), text))
        self._loop.call_at(begun_s + (number + 1) * self._settings.gap_s, self._step, number + 1, begun_s)


class Relay(asyncio.Protocol):
    """One end of a connection that is copied: the least that a program between client and engine costs."""

    def __init__(self, port: int | None, other: Relay | None = None) -> None:
        self._port, self.other = port, other
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._port is not None:
            self._opening = asyncio.create_task(self._open(self._port))

    async def _open(self, port: int) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(lambda: Relay(None, self), "127.0.0.1", port)
        if self._waiting:
            self.other.transport.write(self._waiting)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._waiting += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


@dataclass
class Measured:
    delays_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.delays_s += other.delays_s
        self.first_s += other.first_s

    def row(self) -> dict[str, float]:
        """Milliseconds."""
        cuts = statistics.quantiles(self.delays_s, n=100)
        first = statistics.quantiles(self.first_s, n=100)
        return {
            "chunk p50": cuts[49] * 1e3, "chunk p99": cuts[98] * 1e3, "first p50": first[49] * 1e3,
            "first p99": first[98] * 1e3,
        }  # fmt: skip


class Stream(asyncio.Protocol):
    """One client's stream: from each chunk's writing to its arrival."""

    def __init__(self, measured: Measured, asked_s: float) -> None:
        self._measured, self._asked_s = measured, asked_s
        self._first = True
        self._input = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        *events, self._input = (self._input + data).split(b"\n\n")
        for text in events:
            at = text.find(b'"sent":') + 7
            if at >= 7:
                self._measured.delays_s.append(now_s - float(text[at : text.find(b",", at)]))
                if self._first:
                    self._measured.first_s.append(now_s - self._asked_s)
                    self._first = False
            elif text.endswith(b"data: [DONE]"):
                self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def client(port: int, settings: Settings) -> Measured:
    """Open streams at a constant rate; measure from each chunk's writing to its arrival."""
    measured, loop = Measured(), asyncio.get_running_loop()
    draw = random.Random(1)

    async def one() -> None:
        asked_s = time.monotonic()
        _, stream = await loop.create_connection(lambda: Stream(measured, asked_s), "127.0.0.1", port)
        await stream.ended

    begun, tasks = time.monotonic(), []
    for number in range(int(settings.streams_per_s * settings.seconds)):
        moved = draw.random() if settings.spread else 0.0
        await asyncio.sleep(begun + (number + moved) / settings.streams_per_s - time.monotonic())
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return measured


async def serve(protocol: Any) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engine", "relay"))
    parser.add_argument("--port", type=int, default=0, help="of the engine, for a relay")
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--gap-s", type=float, default=0.02)
    given = parser.parse_args()
    settings = Settings(0, given.chunks, given.gap_s, 0)
    asyncio.run(serve((lambda: Engine(settings)) if given.what == "engine" else (lambda: Relay(given.port))))


if __name__ == "__main__":
    main()
