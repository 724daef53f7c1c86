"""Comments on streams of events that are silent for long, so that proxies with a limit on silence do not cut them.

The program next to the client sends them: a router, or an engine without one. A router therefore asks its backends for
none (`X-Stoker-Comments: 0`), as a client may. Readers of events skip comments, so they are no answer: nothing that
measures or keeps a stream counts them.

One `StreamComments` per answer; it changes nothing but its own count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

COMMENTS_HEADER = b"x-stoker-comments"
"""In a request: `0` asks for a stream without comments."""
COMMENT = b": keep-alive\n\n"
ENDS = (b"\n\n", b"\r\n\r\n")
"""Of an event. A comment may stand behind one alone."""
LOOKS = 4
"""Looks at a stream in one interval: a silence ends after an interval and a quarter at most."""


class StreamComments:
    """While entered, comments each time that nothing was sent for `interval_s`; never, for 0.

    A comment whose client has gone ends the comments, and the next event meets the same. Any other failure of a comment
    is raised where the stream ends.
    """

    def __init__(self, interval_s: float, sent: Callable[[], int], comment: Callable[[], Awaitable[None]]) -> None:
        """`sent`: bytes that were sent so far; `comment` sends one, and may begin the stream for it."""
        self._look_s, self._sent, self._comment = interval_s / LOOKS, sent, comment
        self._seen, self._quiet = 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StreamComments:
        self._seen = self._sent()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = 0
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            failure = None if self._task.cancelled() else self._task.exception()
            if failure is not None and error is None and not isinstance(failure, OSError):
                raise failure

    def _wait(self) -> None:
        if self._look_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        sent = self._sent()
        self._quiet = self._quiet + 1 if sent == self._seen else 0
        self._seen = sent
        if self._quiet < LOOKS:
            self._wait()
            return
        self._task = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        await self._comment()
        self._quiet, self._seen = 0, self._sent()
        self._wait()


def without_comments(data: bytes) -> bytes:
    """Return the bytes behind the comments with which they begin; one that has not ended stays."""
    while data.startswith(b":"):
        ends = [(at, mark) for mark in ENDS if (at := data.find(mark)) >= 0]
        if not ends:
            return data
        at, mark = min(ends)
        data = data[at + len(mark) :]
    return data
