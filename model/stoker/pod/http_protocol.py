"""The server's side of one HTTP/1.1 connection, with limits on what a client can make it hold and for how long.

uvicorn's httptools protocol has no limits: a head may grow and a slow client may wait without end. h11 bounds heads,
but takes 80 us for a request where httptools takes 3, and heads arrive before authorisation. The limits are added here.

`serve` gives the class to uvicorn, which makes one instance for each connection. Its state is changed only by the bytes
of that connection and by `serve`, which calls `check_deadlines`. Independent of routes and programs.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from stoker.pod.asgi import Receive, Scope, Send
from stoker.pod.chunkless_body import ChunklessBody
from stoker.pod.client_presence import EXTENSION as PRESENCE
from stoker.pod.client_presence import ClientPresence
from stoker.pod.direct_body import offer_direct_body
from stoker.pod.http_limits import HttpLimits

MAX_PIPELINED = 16
"""Requests that a client may send ahead on one connection."""
SPARE_CONNECTIONS = 64
"""Accepted beyond `max_connections`, for probes."""
SPARE_HEAD_TIMEOUT_S = 2.0
PROBE_PATHS = frozenset((b"/livez", b"/readyz", b"/status", b"/metrics", b"/health"))
DISCARDED_BYTES = 16 * 2**20
"""How much of a refused request is read and dropped, so that the client sees the answer and not a reset connection.
The rest is not read, and the connection is cut after `CLOSING_S`."""
CLOSING_S = 2.0
"""How long a client may take to close after a refusal."""
RETRY_AFTER_S = 1

Warn = Callable[[str], None]


class Refusal(Exception):
    """A request that is answered here, before any application sees it; the connection closes after the answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return json.dumps({"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}).encode()


class _Phase(Enum):
    """The event that the server waits for."""

    HEAD = "head"
    BODY = "body"
    IDLE = "idle"
    """The next request; uvicorn's keep-alive timer runs."""
    CLOSING = "closing"
    """The client's end of the connection, after a refusal; what still comes is dropped."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `check_deadlines` must be called regularly."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None, *,
        limits: HttpLimits, warn: Warn, number: int = 0, on_lost: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`number`: connections of all processes that share the limit, with this one; `on_lost`: called at its end."""
        super().__init__(config, server_state, app_state, _loop)
        self._number, self._on_lost = number, on_lost
        self.limits = limits
        self._warn = warn
        self._phase = _Phase.HEAD
        self._since = self.loop.time()
        self._head_bytes = 0
        self._body_bytes = 0
        self._checked = self._since
        self._discarded_bytes = 0
        self._write_paused_at: float | None = None
        self._refusal: Refusal | None = None
        self._spare = False
        self.url = b""
        self._present = deque[ClientPresence]()
        """Of the requests without a whole answer, in their order."""

    # Limits on size.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        number = max(len(self.connections), self._number)
        self._spare = number > self.limits.max_connections
        if number > self.limits.max_connections + SPARE_CONNECTIONS:
            self._warn("connections are refused: the limit is reached")
            self._refuse(too_many_connections(self.limits))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for presence in self._present:
            presence.leave()
        self._present.clear()
        if self._on_lost is not None:
            self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE and data[:4].strip(b"\r\n"):  # some clients end a body with an empty line
            self._begin_head()
        while data and not self.transport.is_closing():
            if self._phase is _Phase.CLOSING:
                self._discard(len(data))
                return
            part, data = self._next_part(data)
            self._feed(part)

    def _next_part(self, data: bytes) -> tuple[bytes, bytes]:
        """Split data into a part for the parser and a rest: a head gets no more than it may still have."""
        if self._phase is not _Phase.HEAD:
            return data, b""
        room = self.limits.max_head_bytes + 1 - self._head_bytes
        part = data[:room]
        self._head_bytes += len(part)
        return part, data[room:]

    def _feed(self, part: bytes) -> None:
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade to anything but a WebSocket is ignored, as HTTP allows
        except httptools.HttpParserError as error:
            if self._refusal is None:
                self._warn(f"invalid HTTP request: {error}")
            self._refuse(self._refusal or Refusal(400, "invalid_http", "The request is not valid HTTP/1.1."))
            return
        if self._phase is _Phase.HEAD and self._head_bytes > self.limits.max_head_bytes:
            self._refuse(self._head_too_large())

    def _reject(self, refusal: Refusal) -> NoReturn:
        """Stop the parser from inside one of its callbacks; `_feed` then answers."""
        self._refusal = refusal
        raise refusal

    def _head_too_large(self) -> Refusal:
        if not self.headers and len(self.url) + len(b"OPTIONS  HTTP/1.1\r\n") > self.limits.max_url_bytes:
            return self._url_too_long()
        return Refusal(
            431, "head_too_large", f"The request's headers have more than {self.limits.max_head_bytes} bytes."
        )

    def _url_too_long(self) -> Refusal:
        return Refusal(414, "url_too_long", f"The request's URL has more than {self.limits.max_url_bytes} bytes.")

    # What the parser calls.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(Refusal(400, "too_many_pipelined", f"At most {MAX_PIPELINED} requests may be sent ahead."))
        if self._phase is not _Phase.HEAD:  # sent ahead, right behind another request
            self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_url_bytes:
            self._reject(self._url_too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(b" \t"))  # the parser drops only the blanks before a value
        if len(self.headers) > self.limits.max_headers:
            number = self.limits.max_headers
            self._reject(Refusal(431, "too_many_headers", f"The request has more than {number} headers."))

    def on_headers_complete(self) -> None:
        self._check_head()
        self._phase, self._since = _Phase.BODY, self.loop.time()
        self._body_bytes = self._discarded_bytes = 0
        path = self.url.partition(b"?")[0]
        self.app = self._full if self._spare and path not in PROBE_PATHS else self.config.loaded_app
        super().on_headers_complete()
        scope: Any = self.cycle.scope
        presence = ClientPresence()
        self._present.append(presence)
        scope["extensions"] = {PRESENCE: presence}
        offer_direct_body(self.cycle)
        if scope["http_version"] == "1.0":
            cycle: Any = self.cycle
            cycle.send = ChunklessBody(self.cycle).send

    def on_response_complete(self) -> None:
        if self._present:
            self._present.popleft()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._discard(len(body))

    def _discard(self, count: int) -> None:
        """Drop what comes behind an answer; beyond a limit read no more, and leave the client time for the answer."""
        self._discarded_bytes += count
        if self._discarded_bytes <= DISCARDED_BYTES:
            return
        self.flow.pause_reading()  # a reset at once might reach the client before it has read the answer
        if self._phase is not _Phase.CLOSING:
            self._phase, self._since = _Phase.CLOSING, self.loop.time()

    def on_message_complete(self) -> None:
        self._phase = _Phase.IDLE
        super().on_message_complete()

    def _check_head(self) -> None:
        """Refuse what HTTP/1.1 does not allow, and what the parser would get wrong."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._reject(Refusal(400, "http_version", f"HTTP/{version} is not served; HTTP/1.1 is needed."))
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._reject(Refusal(400, "host_header", f"Exactly one Host header is needed, the request has {hosts}."))
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            message = "Only the transfer coding chunked is served; send the body with it, or with Content-Length."
            self._reject(Refusal(501, "transfer_coding", message))
        self._check_coding()
        if self.parser.should_upgrade():
            self._check_upgrade()

    def _check_coding(self) -> None:
        """Refuse a compressed body, of which a route would say that it is no JSON."""
        coding = next((value for name, value in self.headers if name == b"content-encoding"), b"identity")
        if self._has_body() and coding.lower() not in (b"identity", b""):
            message = f"Content-Encoding {coding[:40].decode('latin-1')} is not served; send the body uncompressed."
            self._reject(Refusal(415, "content_coding", message))

    def _has_body(self) -> bool:
        lengths = (b"content-length", b"transfer-encoding")
        return any(name in lengths and value != b"0" for name, value in self.headers)

    def _check_upgrade(self) -> None:
        """Refuse an upgrade that cannot be ignored: a WebSocket's client speaks no HTTP, and a body would be lost."""
        if self._get_upgrade() == b"websocket":
            self._reject(Refusal(400, "no_websocket", "WebSocket is not served here; send plain HTTP/1.1 requests."))
        if self._has_body():
            self._reject(Refusal(400, "upgrade", "An Upgrade header with a body is not served; leave it out."))

    async def _full(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer a request beyond the limit on connections that is no probe."""
        self._warn("requests are refused: the limit on connections is reached")
        refusal = too_many_connections(self.limits)
        body = refusal.body()
        headers = [(key.encode(), value.encode()) for key, value in _headers(refusal, body).items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # Limits on time.

    def _begin_head(self) -> None:
        self._phase, self._since, self._head_bytes = _Phase.HEAD, self.loop.time(), 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_paused_at = None

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client has taken too long."""
        if self._waits_for_application():
            self._since += now - self._checked  # the client is not the slow one
        self._checked = now
        if self._write_paused_at is not None and now - self._write_paused_at > self.limits.send_timeout_s:
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._phase is _Phase.HEAD and now - self._since > self._head_timeout_s():
            self._end_slow_head()
        elif self._phase is _Phase.BODY and now - self._since > self._body_timeout_s():
            self._refuse(Refusal(408, "body_timeout", "The request's body arrived too slowly."))
        elif self._phase is _Phase.CLOSING and now - self._since > CLOSING_S:
            self.transport.abort()

    def _waits_for_application(self) -> bool:
        """Whether the client cannot send: reading is paused, or it waits for `100 Continue`."""
        if self._phase is not _Phase.BODY:
            return False
        return self.flow.read_paused or self.cycle.waiting_for_100_continue

    def _head_timeout_s(self) -> float:
        limit_s = self.limits.head_timeout_s
        return min(limit_s, SPARE_HEAD_TIMEOUT_S) if self._spare else limit_s

    def _body_timeout_s(self) -> float:
        return self.limits.body_timeout_s + self._body_bytes / self.limits.min_body_bytes_per_s

    def _end_slow_head(self) -> None:
        if self._head_bytes:
            self._refuse(Refusal(408, "head_timeout", "The request's headers arrived too slowly."))
        else:
            self.transport.close()

    # Answers.

    def _is_answering(self) -> bool:
        """Return whether an answer to an earlier request, or to this one, has still to end."""
        cycle = self.cycle
        if cycle is None:
            return False
        if self._phase is _Phase.BODY:  # the request of this body
            return bool(self.pipeline) or cycle.response_started
        return not cycle.response_complete  # the request before

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close; close without an answer if it would run into another one on this connection."""
        if self._is_answering():
            self.transport.abort()
            return
        body = refusal.body()
        lines = [f"{name}: {value}\r\n".encode() for name, value in _headers(refusal, body).items()]
        own = [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        self.transport.write(b"".join([STATUS_LINE[refusal.status], *own, *lines, b"\r\n", body]))
        self.transport.write_eof()
        if self.cycle is not None:  # the application need not wait for the rest
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._phase, self._since, self._discarded_bytes = _Phase.CLOSING, self.loop.time(), 0


def too_many_connections(limits: HttpLimits) -> Refusal:
    return Refusal(
        503, "too_many_connections", f"The server has {limits.max_connections} connections; try again later."
    )


def _headers(refusal: Refusal, body: bytes) -> dict[str, str]:
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    return {**headers, "retry-after": str(RETRY_AFTER_S)} if refusal.status == 503 else headers


class RateLimitedWarning:
    """Logs a message at most once in `interval_s`, with the number of messages that were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], interval_s: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._next_at = float("-inf")
        self._left_out = 0

    def __call__(self, message: str) -> None:
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last message)" if self._left_out else ""
        self._logger.warning("%s%s", message, more)
        self._next_at, self._left_out = now + self._interval_s, 0
