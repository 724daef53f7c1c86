"""A stream whose answer has not begun: while its request waits, comments may begin it.

Made by `Proxy` for each request. A client that asked for no stream is sent nothing before its answer.
"""

from __future__ import annotations

from stoker.pod.asgi import Scope, header
from stoker.pod.stream_comments import COMMENTS_HEADER
from stoker.router.answer import start_message
from stoker.router.client import Client
from stoker.router.connection import Outgoing
from stoker.router.request_fields import fields_of

STREAM_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def may_have_comments(scope: Scope) -> bool:
    """Whether a request's answer may be a stream, and its sender takes comments."""
    return scope["method"] == "POST" and scope["path"] in STREAM_PATHS and header(scope, COMMENTS_HEADER) != b"0"


class WaitingStream:
    """Comments before the answer."""

    def __init__(self, request: Outgoing, client: Client) -> None:
        self.request, self.client = request, client
        self._asked: bool | None = None
        """Whether the request asks for a stream; None: its body was not read yet, which takes time."""

    async def comment(self) -> None:
        """Send a comment, and the head of a stream before the first one."""
        if self._asked is None:
            self._asked = (fields_of(self.request.body) or {}).get("stream") is True
        if not self._asked:
            return
        if not self.client.begun:
            self.client.begun = True
            await self.client.send(start_message(200, [*HEAD, (b"x-request-id", self.client.request_id)]))
        await self.client.comment()
