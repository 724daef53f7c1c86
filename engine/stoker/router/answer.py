"""One answer of a backend that has begun, and the ASGI messages that pass it on.

Made by `Proxy`; `Carrier` passes on those that can go on elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.pod.asgi import Message
from stoker.router.answer_parser import Head
from stoker.router.backend import Backend, Candidate
from stoker.router.connection import Connection, Sink

MAX_DIGITS = 10
"""A time to wait has fewer."""


@dataclass
class BackendAnswer:
    """An answer of a backend that has begun: its head and the first part of its body have arrived."""

    candidate: Candidate
    """The backend, or the data rank of it that was named."""
    connection: Connection
    head: Head
    first: bytes
    """Empty: so is the body."""
    place: int | None = None
    """The number of the request's class; None: it has none."""

    @property
    def backend(self) -> Backend:
        """The pod that answers."""
        return self.candidate.backend

    @property
    def is_stream(self) -> bool:
        """Whether it comes as server-sent events."""
        return self.head.header(b"content-type").startswith(b"text/event-stream")

    async def body(self, sink: Sink | None = None) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, but for the parts that `sink` takes.

        Raises:
            BackendError: it broke off.
        """
        part, silence_s = self.first, self.backend.times.silence_s
        while part:
            yield part
            part = await self.connection.read(silence_s, sink)


def lost(reason: str = "") -> bytes:
    """The last events of a stream whose backend is lost."""
    error: Mapping[str, Any] = {
        "message": "The connection to the engine broke; the answer is not complete. Send the request again."
        + (f" ({reason})" if reason else ""),
        "type": "server_error",
        "param": None,
        "code": "backend_lost",
    }
    return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()


def event_of(status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The last events of a stream that had begun with a comment when an answer came that is none.

    Args:
        headers: of the answer. The error gets the whole seconds of `Retry-After` as `retry_after_s`.
    """
    try:
        found = json.loads(body)["error"]
        error = found if isinstance(found, dict) else {"message": str(found)}
    except (ValueError, KeyError, TypeError):
        error = {"message": f"The engine answered {status} instead of a stream.", "type": "server_error"}
    seconds = dict(headers).get(b"retry-after", b"")
    again = {"retry_after_s": int(seconds)} if seconds.isdigit() and len(seconds) < MAX_DIGITS else {}
    content = {"error": {"param": None, "code": None, **error, "status": status, **again}}
    return f"data: {json.dumps(content)}\n\ndata: [DONE]\n\n".encode()


def start_message(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body_message(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
