"""A client's side of one request: where its answer goes. Made by `Proxy` for each request."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.asgi import Send
from stoker.pod.direct_body import DirectBody


@dataclass(frozen=True)
class Client:
    """How an answer reaches a client."""

    send: Send
    request_id: bytes
    direct: DirectBody | None = None
    """None: every part is sent by a task."""
