"""A client's side of one request: where its answer goes. Made by `Proxy` for each request."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.asgi import Send
from stoker.pod.direct_body import DirectBody
from stoker.pod.stream_comments import COMMENT, ENDS
from stoker.router.answer import body_message


@dataclass
class Client:
    """How an answer reaches a client."""

    send: Send
    request_id: bytes
    direct: DirectBody | None = None
    """None: every part is sent by a task."""
    begun: bool = False
    """Whether the head of a stream was sent for a comment, before the answer began."""
    sent: int = 0
    """Bytes of the body."""
    last: bytes = b"\n\n"
    """The part that was sent last."""

    @property
    def open(self) -> bool:
        """Whether it takes a part of the body at once."""
        return self.direct is not None and self.direct.open

    def write(self, part: bytes) -> None:
        """Write a part of the body, without a task; only while `open`."""
        if part:
            assert self.direct is not None
            self._note(part)
            self.direct.write(part)

    async def pass_on(self, part: bytes) -> None:
        """Send a part of the body, and wait while the client is slow."""
        if part:
            self._note(part)
            await self.send(body_message(part, more=True))

    async def comment(self) -> None:
        """Send a comment, unless an event has begun and not ended."""
        if self.last.endswith(ENDS):
            await self.pass_on(COMMENT)

    def _note(self, part: bytes) -> None:
        self.sent += len(part)
        self.last = part
