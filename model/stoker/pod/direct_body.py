"""The body of an answer, written to its client at once instead of by a task: an extension of our HTTP server to ASGI.

`send` of ASGI must be awaited, so a part that arrives from elsewhere has to wake a task first. `DirectBody` writes it
where it arrives, while the client takes what it gets; otherwise the application awaits `send` as always. The two may
alternate: both write to the same connection at once.

One object per request, made by `BoundedHttpProtocol`. An application finds it with `direct_body`; another server gives
none.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stoker.pod.asgi import Scope

EXTENSION = "stoker.direct_body"


class DirectBody:
    """Writes parts of a body in chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """Whether a part can be written now: the body has begun in chunks, and its client is there and not slow."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
            and not cycle.transport.is_closing()
            and cycle.scope["method"] != "HEAD"
        )

    def write(self, part: bytes) -> None:
        """Write a part that is not empty; only while `open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def offer_direct_body(cycle: RequestResponseCycle) -> None:
    """Add the extension to the scope of a request that begins."""
    scope: Any = cycle.scope
    scope.setdefault("extensions", {})[EXTENSION] = DirectBody(cycle)


def direct_body(scope: Scope) -> DirectBody | None:
    """The extension; None where the server has it not."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, DirectBody) else None
