"""Parts of an ASGI application that engine and router share: reading a request.

No state. Called by the engine's server, the router's proxy and `http`.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from stoker.pod.body_budget import BodyShare

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_REQUEST_ID_BYTES = 128


class ClientLeft(Exception):
    """The client closed its connection before it had sent the whole request."""


class BodyTooLarge(Exception):
    """The request's body is larger than the program allows."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"The request body is larger than {max_bytes} bytes.")


async def read_body(receive: Receive, max_bytes: int, share: BodyShare) -> bytes:
    """Read the whole request body and count it against the program's budget.

    Raises:
        BodyTooLarge: it has more than `max_bytes`.
        BodyBudgetSpent: the bodies of all requests together fill the budget.
        ClientLeft: the client closed its connection first.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(max_bytes)
        share.take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes:
    """The value of the first header called `name` (lower case), or nothing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def request_id(scope: Scope, new_id: Callable[[], str] = lambda: f"req-{uuid.uuid4().hex}") -> bytes:
    """The client's `X-Request-Id` if it has 1 to 128 printable ASCII characters, else a new one."""
    given = header(scope, b"x-request-id")
    if 0 < len(given) <= MAX_REQUEST_ID_BYTES and all(0x20 < byte < 0x7F for byte in given):
        return given
    return new_id().encode()
