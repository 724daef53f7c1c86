"""Refusals that the router answers itself, in OpenAI's shape. Raised by `Proxy` and `Admission`."""

from __future__ import annotations

import json

RETRY_AFTER_S = 1
"""Shortest time after which a client should try again."""
TYPES = {429: "rate_limit_error"}
"""Status -> `type` of the error; others by their hundred."""


class Refused(Exception):
    """A request that the router answers itself, in OpenAI's shape."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: int | None = None, *, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.param = param

    def body(self) -> bytes:
        """The answer's body."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self, request_id: bytes) -> list[tuple[bytes, bytes]]:
        """The answer's headers."""
        found = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body())).encode()),
            (b"x-request-id", request_id),
        ]
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        return found
