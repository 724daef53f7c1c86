"""Streamed completions with the arrival time of every event, for `bench.gpu.pd_gpu`."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.pod.split_requests import PREFILL_HEADER

EVENT = b"data: {"
LIMIT_S = 90.0


@dataclass(frozen=True)
class Ask:
    """One request: greedy, end tokens ignored, so that its answer has exactly `output` tokens."""

    port: int
    prompt: list[int] = field(repr=False)
    output: int
    helper: str = ""
    """Endpoint of the engine that computes the prompt."""

    @property
    def content(self) -> bytes:
        body = {
            "model": "m", "prompt": self.prompt, "max_tokens": self.output, "stream": True, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = [
            "POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json",
            f"Content-Length: {len(data)}", *([f"{PREFILL_HEADER.decode()}: {self.helper}"] if self.helper else ()),
        ]  # fmt: skip
        return "\r\n".join([*head, "", ""]).encode() + data


class Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.sent_s = 0.0
        self.stamps: list[float] = []
        """One for each event, which holds one token or, where it had to wait, several."""
        self._data: list[bytes] = []
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()
        self.aborted = False

    async def run(self) -> None:
        content = self.ask.content
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self.ask.port)
        except OSError as error:
            self._data.append(str(error).encode())
            return
        self._transport = transport
        self.sent_s = time.monotonic()
        transport.write(content)
        try:
            await asyncio.wait_for(self._ended.wait(), LIMIT_S)
        except TimeoutError:
            transport.abort()

    def abort(self) -> None:
        self.aborted = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        self._data.append(data)
        seen = self._tail + data
        self.stamps += [now_s] * seen.count(EVENT)
        self._tail = seen[-len(EVENT) + 1 :]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # a broken answer has no end
        self._ended.set()

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.stamps[0] - self.sent_s if self.stamps else float("nan")

    @property
    def chunks(self) -> list[str]:
        lines = b"".join(self._data).decode(errors="replace").splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {") and line.endswith("}")]
        return [one["choices"][0].get("text", "") for one in events if one.get("choices")]

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    @property
    def complete(self) -> bool:
        """Whether every token has come, and the end."""
        data = b"".join(self._data)
        return b"data: [DONE]" in data and len(self.text.split()) == self.ask.output

    @property
    def problem(self) -> str:
        data = b"".join(self._data)
        return f"{len(self.text.split())} of {self.ask.output} tokens; {data[:60]!r} ... {data[-120:]!r}"


def run_all(asks: Sequence[Ask]) -> list[Stream]:
    """Send all at once and wait for their ends."""

    async def run() -> list[Stream]:
        streams = [Stream(ask) for ask in asks]
        await asyncio.gather(*(one.run() for one in streams))
        return streams

    return asyncio.run(run())


def gaps_of(streams: Sequence[Stream], begun_s: float = 0.0, ended_s: float = float("inf")) -> list[float]:
    """Seconds between neighbouring tokens of each stream, of those that came between the two times."""
    return [
        later - earlier
        for one in streams
        for earlier, later in itertools.pairwise(one.stamps)
        if begun_s <= earlier and later <= ended_s
    ]
