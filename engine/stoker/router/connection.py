"""One HTTP/1.1 connection to a backend: one exchange at a time, chunks passed on as they arrive.

Opened and kept by a `Backend`; `Proxy` runs the exchange of a client's request on it. Decides nothing about
health or policy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import h11

READ_BYTES = 65536
MAX_SMALL_BODY_BYTES = 1 << 20

Headers = Sequence[tuple[bytes, bytes]]


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
        try:
            h11.Request(method=self.method, target=self.target, headers=[(b"host", b"x"), *self.headers])
        except h11.LocalProtocolError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Head:
    """Status line and headers of an answer."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class Connection:
    """An open connection. It can carry another exchange while it is `reusable`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host.encode()
        self._wire = h11.Connection(h11.CLIENT)
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
                reader, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{host}:{port}: {error or 'no connection within the time limit'}") from error
        return cls(reader, writer, f"{host}:{port}")

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
        headers = [(b"host", self._host), *request.headers]
        if request.body or request.method in ("POST", "PUT", "PATCH"):
            headers.append((b"content-length", str(len(request.body)).encode()))
        try:
            parts = [self._wire.send(h11.Request(method=request.method, target=request.target, headers=headers))]
            if request.body:
                parts.append(self._wire.send(h11.Data(data=request.body)))
            parts.append(self._wire.send(h11.EndOfMessage()))
            # Not drained: the answer may come before the whole body was read, and must not be lost behind it.
            self._writer.writelines([part for part in parts if part])
            while True:
                event = await self._event(timeout_s)
                if isinstance(event, h11.Response):
                    return Head(event.status_code, list(event.headers))
                if not isinstance(event, h11.InformationalResponse):
                    raise Unreachable("the connection was closed before an answer")
        except (OSError, h11.ProtocolError) as error:
            raise Unreachable(f"the connection broke before an answer: {error}") from error

    async def chunks(self, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            Broken: the connection ended before the body did.
            Silent: nothing came for `timeout_s`.
        """
        try:
            while True:
                event = await self._event(timeout_s)
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return
                else:
                    raise Broken("the connection was closed in the middle of the answer")
        except (OSError, h11.ProtocolError) as error:
            raise Broken(f"the answer broke off: {error}") from error

    async def _event(self, timeout_s: float) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._wire.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                async with asyncio.timeout(timeout_s):
                    data = await self._reader.read(READ_BYTES)
            except TimeoutError as error:
                raise Silent(f"nothing came for {timeout_s:g} s") from error
            self._wire.receive_data(data)

    @property
    def reusable(self) -> bool:
        """Whether another exchange can begin: the last one is finished and the peer has not closed."""
        sent = self._writer.transport.get_write_buffer_size() == 0
        return sent and self._wire.our_state is h11.IDLE and not self._reader.at_eof() and not self._writer.is_closing()

    def finish(self) -> None:
        """End an exchange; leave the connection ready for another one, or closed."""
        if self._wire.our_state is h11.DONE and self._wire.their_state is h11.DONE:
            self._wire.start_next_cycle()
        else:
            self.close()

    def close(self) -> None:
        """Close it at once; the backend sees a disconnect."""
        self._writer.transport.abort()
