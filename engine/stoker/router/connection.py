"""One HTTP/1.1 connection to a backend: one exchange at a time, parts of the body passed on as they arrive.

Opened and kept by a `Backend`; `Proxy` runs the exchange of a client's request on it. Decides nothing about
health or policy.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from stoker.router.answer_parser import AnswerParser, Head, Headers

MAX_HELD_BYTES = 65536
"""Bytes of a body that wait for the client; beyond them nothing is read from the backend."""
MAX_SMALL_BODY_BYTES = 1 << 20
JOINED_BYTES = 65536
"""A request up to this size is sent in one piece, which costs a copy."""
WITH_BODY = frozenset(("POST", "PUT", "PATCH"))

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[!-~]+")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")


class BackendError(Exception):
    """The backend cannot be used.

    BackendError
    ├── Unreachable    no connection, or it broke before a byte of an answer
    ├── WrongPod       another pod answers at the address
    ├── Silent         nothing came for `request_timeout_s`
    └── Broken         the answer ended in the middle
    """


class Unreachable(BackendError):
    """No connection, or it broke before a byte of an answer."""


class WrongPod(BackendError):
    """Another pod answers at the address."""


class Silent(BackendError):
    """Nothing came for longer than is allowed."""


class Broken(BackendError):
    """The answer ended in the middle."""


@dataclass(frozen=True)
class Outgoing:
    """A request with its whole body, which can be sent more than once."""

    method: str
    target: bytes
    headers: Headers
    body: bytes = b""

    @property
    def problem(self) -> str | None:
        """Why the head cannot be sent to any backend; None when it can."""
        if not _TOKEN.fullmatch(self.method.encode()):
            return f"the method {self.method!r} is no token"
        if not _TARGET.fullmatch(self.target):
            return f"the target {self.target!r} has characters that a target may not have"
        for name, value in self.headers:
            if not _TOKEN.fullmatch(name):
                return f"the name of the header {name!r} is no token"
            if not _VALUE.fullmatch(value):
                return f"the header {name!r} has characters that a value may not have: {value[:100]!r}"
        return None

    def head(self, host: bytes) -> bytes:
        """Request line and headers as they are sent; `problem` must be None."""
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (self.method.encode(), self.target, host)]
        lines += [b"%s: %s" % header for header in self.headers]
        if self.body or self.method in WITH_BODY:
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Sink(Protocol):
    """What takes parts of a body where they arrive, without a task."""

    @property
    def open(self) -> bool:
        """Whether it takes a part now."""
        ...

    def add(self, part: bytes) -> None: ...


class Connection(asyncio.Protocol):
    """An open connection. It can carry another exchange while it is `reusable`.

    What arrives is parsed at once and wakes the one reader. A single timer watches for silence: each wait moves its
    limit, and the timer is set again only when it runs out.
    """

    def __init__(self, host: str) -> None:
        self._host = host.encode()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(Any, None)  # until `connection_made`
        self._wire = AnswerParser()
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._failure: Exception | None = None
        """Of a sink."""
        self._silence_s = self._silent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self.fresh = True
        """Used by the identity check only."""

    @classmethod
    async def open(cls, address: tuple[str, int], timeout_s: float) -> Connection:
        """Open a connection.

        Raises:
            Unreachable: refused, no route, or not within `timeout_s`.
        """
        host, port = address
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: cls(f"{host}:{port}"), host, port
                )
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{host}:{port}: {error or 'no connection within the time limit'}") from error
        return connection

    async def check_identity(self, pod_uid: str, timeout_s: float) -> None:
        """Check that the other end is the pod `pod_uid`.

        Raises:
            WrongPod: another pod answers.
            Unreachable, Silent: no usable answer.
        """
        found = await self._status_field("pod_uid", timeout_s)
        if found != pod_uid:
            raise WrongPod(f"{self._host.decode()}: pod {pod_uid} was expected, {found} answers")

    async def phase(self, timeout_s: float) -> str:
        """The `phase` of the backend's `/status`; empty if it names none.

        Raises:
            Unreachable, Silent: no usable answer.
        """
        return str(await self._status_field("phase", timeout_s) or "")

    async def _status_field(self, name: str, timeout_s: float) -> object:
        head, body = await self.small_exchange(Outgoing("GET", b"/status", ()), timeout_s)
        try:
            return json.loads(body).get(name) if head.status == 200 else None
        except (ValueError, AttributeError):
            return None

    async def small_exchange(self, request: Outgoing, timeout_s: float) -> tuple[Head, bytes]:
        """Send a request and read its whole answer (at most 1 MiB); the connection is free afterwards."""
        try:
            async with asyncio.timeout(timeout_s):
                head = await self.exchange(request, timeout_s)
                body = await self.rest(timeout_s)
        except TimeoutError as error:
            raise Silent(f"no answer within {timeout_s:g} s") from error
        self.finish()
        return head, body

    async def rest(self, timeout_s: float) -> bytes:
        """Read the rest of a small body.

        Raises:
            Broken: it ended early or is larger than 1 MiB.
        """
        collected = bytearray()
        async for chunk in self.chunks(timeout_s):
            collected += chunk
            if len(collected) > MAX_SMALL_BODY_BYTES:
                raise Broken("the answer is larger than 1 MiB")
        return bytes(collected)

    async def exchange(self, request: Outgoing, timeout_s: float) -> Head:
        """Send a request and wait for the head of its answer.

        Raises:
            Unreachable: the connection broke before the answer.
            Silent: nothing came for `timeout_s`.
        """
        self._wire.begin(request.method)
        # Not drained: the answer may come before the whole body was read, and must not be lost behind it.
        head = request.head(self._host)
        if len(request.body) <= JOINED_BYTES:
            self._transport.write(head + request.body)
        else:
            self._transport.write(head)
            self._transport.write(request.body)
        while (answer := self._wire.head) is None:
            if self._wire.problem:
                raise Unreachable(f"the connection broke before an answer: {self._wire.problem}")
            await self._arrival(timeout_s)
        return answer

    async def chunks(self, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            Broken, Silent: as `read`.
        """
        while part := await self.read(timeout_s):
            yield part

    async def read(self, timeout_s: float, sink: Sink | None = None) -> bytes:
        """Return the next part of the body that `sink` does not take; nothing at the body's end.

        While `sink` is open, parts go to it as they arrive and the caller is not woken.

        Raises:
            Broken: the connection ended before the body did.
            Silent: nothing came for `timeout_s`.
        """
        wire = self._wire
        while not wire.held_bytes or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            if wire.complete:
                return b""
            if wire.problem:
                raise Broken(f"the answer broke off: {wire.problem}")
            await self._arrival(timeout_s, sink)
        part = wire.take()
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return part

    @property
    def reusable(self) -> bool:
        """Whether another exchange can begin: the last one is finished and the peer has not closed."""
        sent = self._transport.get_write_buffer_size() == 0
        return sent and self._wire.complete and not self._wire.problem and not self._transport.is_closing()

    def finish(self) -> None:
        """End an exchange; leave the connection ready for another one, or closed."""
        if not self._wire.complete or self._wire.problem:
            self.close()

    def close(self) -> None:
        """Close it at once; the backend sees a disconnect."""
        self._wire.end("it was closed here")
        self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        wire = self._wire
        wire.feed(data)
        if wire.held_bytes and self._sink is not None and self._sink.open:
            self._pass_to(self._sink, wire.take())
            if not wire.complete and not wire.problem and self._failure is None:
                self._silent_at = self._loop.time() + self._silence_s
                return
        if wire.held_bytes > MAX_HELD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._wire.end_of_connection()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._wire.end(str(exc) or type(exc).__name__)
        self._wire.end_of_connection()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    # Waiting.

    async def _arrival(self, timeout_s: float, sink: Sink | None = None) -> None:
        """Wait until something arrives that `sink` does not take, or the connection ends.

        Raises:
            Silent: neither happened for `timeout_s`.
        """
        self._silence_s, self._silent_at = timeout_s, self._loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._silent_at:
            self._watch()
        self._waiter, self._sink = self._loop.create_future(), sink
        try:
            await self._waiter
        finally:
            self._waiter = self._sink = None

    def _pass_to(self, sink: Sink, part: bytes) -> None:
        try:
            sink.add(part)
        except Exception as error:  # noqa: BLE001 - the reader's to handle, not the event loop's
            self._failure, self._sink = error, None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._silent_at, self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets the timer
        if self._loop.time() < self._silent_at:
            self._watch()
        else:
            self._waiter.set_exception(Silent(f"nothing came for {self._silence_s:g} s"))
