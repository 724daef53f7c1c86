"""The parser of the answers on one connection to a backend, one answer after the other. No I/O.

Owned by `Connection`, which feeds it. httptools parses; here is what a proxy needs beside it: answers that nothing
asked for and heads without end are refused, and a body without a length is whole only if the peer ended it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httptools

MAX_HEAD_BYTES = 65536

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Head:
    """Status line and headers of an answer. Names are in lower case."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class AnswerParser:
    """`begin` an answer, `feed` what comes, `take` its body."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._method = ""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self.held_bytes = 0
        """Of the body, not taken yet."""
        self.head: Head | None = None
        self.complete = True
        """Whether the whole answer has come, or none is expected."""
        self.problem = ""
        """Why no more can come on this connection; empty while it can."""

    def begin(self, method: str) -> None:
        """Expect the answer to a request with this method."""
        self._method = method
        self._headers, self._head_bytes = [], 0
        self._parts.clear()
        self.held_bytes = 0
        self.head, self.complete = None, False

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection. A bad answer is a `problem`."""
        if self.problem:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.end(f"not an answer in HTTP/1.1: {error.__context__ or error}")
            return
        if self.head is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.end(f"the head of the answer has more than {MAX_HEAD_BYTES} bytes")

    def take(self) -> bytes:
        """Return what has come of the body since the last call."""
        parts = self._parts
        taken = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.held_bytes = 0
        return taken

    def end_of_connection(self) -> None:
        """Note that the peer has sent all it will: that ends a body that has no length."""
        if self.head is not None and not self.complete and not self.problem and self._ends_with_connection(self.head):
            self.complete = True
        self.end("the connection was closed")

    def end(self, problem: str) -> None:
        """Note that nothing more can come; the first problem stays."""
        self.problem = self.problem or problem

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("bytes came that belong to no request")

    def on_header(self, name: bytes, value: bytes | None) -> None:
        if self.head is None:  # trailers are dropped
            self._headers.append((name.lower(), (value or b"").strip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self.head = Head(status, self._headers)
        if self._method == "HEAD":  # the parser takes what follows for a body
            self.complete = True
            self.end("an answer to HEAD was the last one")

    def on_body(self, part: bytes) -> None:
        if part and not self.complete:
            self._parts.append(part)
            self.held_bytes += len(part)

    def on_message_complete(self) -> None:
        if self.head is None:
            return  # an informational answer; the real one follows
        self.complete = True
        if not self._parser.should_keep_alive():
            self.end("the backend closes the connection behind this answer")

    def _ends_with_connection(self, head: Head) -> bool:
        chunked = head.header(b"transfer-encoding").lower().endswith(b"chunked")
        return not chunked and not any(name == b"content-length" for name, _ in head.headers)
