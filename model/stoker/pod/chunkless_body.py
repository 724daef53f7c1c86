"""The body of an answer to a client of HTTP/1.0, which knows no chunks: without a length it ends with its connection.

uvicorn sends every body without a length in chunks; such a client takes their sizes for text. Made by
`BoundedHttpProtocol` for each of its requests.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stoker.pod.asgi import Message


class ChunklessBody:
    """Takes the place of a cycle's `send`. uvicorn closes the connections of HTTP/1.0 behind their answers."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def send(self, message: Message) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]  # uvicorn has a type for each message
