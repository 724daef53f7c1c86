"""The sending half of one HTTP exchange: JSON, a page, or a stream of events, each with the request's id.

One object per exchange, made by `server`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.engine.http.errors import ApiError
from stoker.engine.http.openai.sse import DONE, event
from stoker.pod.asgi import Send

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Page:
    """An answer that is not JSON."""

    status: int
    headers: Mapping[str, str]
    content: bytes = b""


class Reply:
    """The sending half of one exchange."""

    def __init__(self, send: Send, request_id: str, pod_uid: str) -> None:
        self.send = send
        self.request_id = request_id
        self.pod_uid = pod_uid
        self.status: int | None = None
        """None: nothing has been sent."""
        self.body_bytes = 0

    async def json(self, status: int, content: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content, separators=(",", ":")).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **(more or {})}
        await self._start(status, headers)
        await self._send(body)

    async def page(self, page: Page) -> None:
        length = {"content-length": str(len(page.content))} if page.content else {}
        await self._start(page.status, {**length, **page.headers})
        await self._send(page.content)

    async def begin_stream(self, more: Mapping[str, str]) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **more,
        }
        await self._start(200, headers)

    async def chunk(self, data: bytes) -> None:
        self.body_bytes += len(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send(b"")

    async def _send(self, body: bytes) -> None:
        """The body, or its end."""
        self.body_bytes += len(body)
        await self.send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        """Send an error as the answer, or as the last event of a stream that has begun."""
        if self.status is None:
            await self.json(error.status, error.body(), error.headers())
            return
        await self.chunk(event(error.late_body()) + DONE)
        await self.end()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        own = {"x-request-id": self.request_id, **({"x-stoker-pod-uid": self.pod_uid} if self.pod_uid else {})}
        raw: Headers = [(key.encode(), value.encode("latin-1", "replace")) for key, value in {**headers, **own}.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
