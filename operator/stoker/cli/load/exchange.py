"""One request and its streamed answer over a connection of its own, with the time of every piece that arrives.

While an answer streams its bytes are only kept; they are read when it has ended, so that many streams at once cost the
client little. Times are seconds of the event loop's clock.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httptools

END = re.compile(rb"\r\n\r\n|\n\n")
"""End of an event. Servers end their lines in either way."""


class Target(NamedTuple):
    """Where requests go."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str]

    def request(self, content: bytes) -> bytes:
        """The whole request as bytes."""
        head = {
            "Host": f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **self.headers,
        }
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        return "\r\n".join(lines).encode() + content


@dataclass
class Answer:
    """What came of a request."""

    due_s: float
    max_tokens: int
    connected_s: float = 0.0
    """Seconds that the connection took."""
    sent_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    """Arrival of each event with output."""
    prompt_tokens: int | None = None
    """None: the server has not counted."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the server counted them; without its count the number of events."""
    ended_s: float = 0.0
    error: str = ""
    """Empty for a whole answer."""


class Exchange(asyncio.Protocol):
    """The connection of one request. `done` is set at its end, never with an error."""

    def __init__(self, loop: asyncio.AbstractEventLoop, content: bytes) -> None:
        self._loop, self._content = loop, content
        self.done: asyncio.Future[None] = loop.create_future()
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.status = 0
        self.problem = ""
        self.body = bytearray()
        self.arrived: list[tuple[int, float]] = []
        """Bytes of the body so far, and when they were there."""
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_s = self._loop.time()
        transport.write(self._content)

    def data_received(self, data: bytes) -> None:
        before = len(self.body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problem = f"no HTTP: {error}"
            self.close()
        if len(self.body) > before:
            self.arrived.append((len(self.body), self._loop.time()))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self.body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.close()

    def eof_received(self) -> None:
        """An answer without a length ends with the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.problem = self.problem or str(exc) or type(exc).__name__
        self.ended_s = self._loop.time()
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        """End the connection; `done` follows."""
        if self._transport is not None:
            self._transport.close()


def events_of(body: bytes | bytearray, arrived: Sequence[tuple[int, float]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the JSON of each event of a stream with the arrival of its last byte, up to `[DONE]`. Raises ValueError."""
    begin, places = 0, [place for place, _ in arrived]
    for end in END.finditer(body):
        lines = body[begin : end.start()].splitlines()
        data = b"".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        begin = end.end()
        if data == b"[DONE]":
            return
        if data:
            yield arrived[bisect.bisect_left(places, begin)][1], _object(data)


def _object(data: bytes) -> dict[str, Any]:
    """Read the JSON of an event. Raises ValueError."""
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an object is needed, got {event!r:.80}")
    return event


async def address_of(target: Target) -> str:
    """The first address of the host that takes connections, so that no request waits for its name; else the name."""
    loop = asyncio.get_running_loop()
    try:
        for *_, (found, *_) in await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM):
            address = str(found)
            with suppress(OSError):
                transport, _ = await loop.create_connection(asyncio.Protocol, address, target.port)
                transport.close()
                return address
    except OSError:
        pass
    return target.host


async def ask(target: Target, address: str, content: bytes, answer: Answer, timeout_s: float) -> None:
    """Send a request now and fill in its answer. Never raises for what the server does."""
    loop = asyncio.get_running_loop()
    exchange, began = Exchange(loop, target.request(content)), loop.time()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await loop.create_connection(
                lambda: exchange,
                address,
                target.port,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
            await exchange.done
    except OSError as error:  # TimeoutError is one, ours as well as the system's
        late = f"no whole answer in {timeout_s:g} s"
        exchange.problem = late if limit.expired() else f"no connection: {error.strerror or error}"
        exchange.ended_s = loop.time()
        exchange.close()
    answer.connected_s = max(0.0, exchange.sent_s - began)
    read_answer(exchange, answer)


def read_answer(exchange: Exchange, answer: Answer) -> None:
    """Fill in times, counts and the error of an exchange that has ended."""
    answer.sent_s, answer.ended_s = exchange.sent_s, exchange.ended_s
    answer.error = exchange.problem or _refusal(exchange)
    if answer.error:
        return
    is_done = b"[DONE]" in exchange.body[-64:]
    try:
        for arrived_s, event in events_of(exchange.body, exchange.arrived):
            _take(event, arrived_s, answer)
    except ValueError as error:
        answer.error = f"an event is no JSON: {error}"
    except (TypeError, AttributeError, OverflowError) as error:
        answer.error = f"an event is not in the form of OpenAI's API: {error}"
    answer.output_tokens = answer.output_tokens or len(answer.stamps)
    if not answer.error and not is_done:
        answer.error = "the answer broke off"
    if not answer.error and not answer.stamps:
        answer.error = "an answer without output"


def _refusal(exchange: Exchange) -> str:
    if exchange.status == 200:
        return ""
    if not exchange.status:
        return "the connection was closed without an answer"
    try:
        message = json.loads(exchange.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = bytes(exchange.body[:200]).decode(errors="replace").strip()
    return f"HTTP {exchange.status}: {message}"[:300]


def _take(event: dict[str, Any], arrived_s: float, answer: Answer) -> None:
    if "error" in event:
        error = event["error"]
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
        return
    if any(_has_output(choice) for choice in event.get("choices") or ()):
        answer.stamps.append(arrived_s)
    if usage := event.get("usage"):
        prompt_tokens = usage.get("prompt_tokens")
        answer.prompt_tokens = None if prompt_tokens is None else int(prompt_tokens)
        answer.output_tokens = int(usage.get("completion_tokens") or 0)
        answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice brings tokens: their text may be empty (special tokens, parts of a letter).

    The beginning of a chat, which names the role, and its end without text bring none.
    """
    if "text" in choice:
        return True
    delta = choice.get("delta") or {}
    if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return delta.get("content") is not None and "role" not in delta and choice.get("finish_reason") is None
