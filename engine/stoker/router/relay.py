"""An answer that only its backend can finish, on its way to the client: passed on as it arrives, events whole.

Made by `Proxy` for each answer that is not a resumable stream; `Passing` is its like for those.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.pod.stream_comments import ENDS, without_comments
from stoker.router.answer import BackendAnswer
from stoker.router.client import Client
from stoker.router.revision_counts import RevisionCounts


class Relay:
    """Passes on a body; a `Sink` of its connection."""

    def __init__(
        self, answer: BackendAnswer, client: Client, clock: Callable[[], float], revisions: RevisionCounts
    ) -> None:
        self.answer = answer
        self.client = client
        self.clock = clock
        self.revisions = revisions
        self.sent = 0
        self._last_s: float | None = None
        self._events = answer.is_stream
        self._tail = b""
        """The begin of an event: a part of one, left by a dying backend, would break parsers."""

    async def run(self) -> None:
        """Send the body.

        Raises:
            BackendError: it broke off. Whole events have been sent.
        """
        async for data in self.answer.body(self):
            await self.client.pass_on(self._noted(data))
        self.sent += len(self._tail)
        await self.client.pass_on(self._tail)

    @property
    def open(self) -> bool:
        """Whether the client takes a part at once."""
        return self.client.open

    def add(self, part: bytes) -> None:
        """Write what a part makes whole, where it arrives; only while `open`."""
        self.client.write(self._noted(part))

    def _noted(self, data: bytes) -> bytes:
        """Note bytes that have arrived; return those to send."""
        if not self._events:
            self.sent += len(data)
            return data
        whole = self._whole(data)
        if without_comments(whole):
            now_s = self.clock()
            if self._last_s is not None:
                self.revisions.gap(self.answer.backend.entry, now_s - self._last_s)
            self._last_s = now_s
        self.sent += len(whole)
        return whole

    def _whole(self, data: bytes) -> bytes:
        """Return the whole events that were not returned yet."""
        data = self._tail + data
        end = end_of_events(data)
        self._tail = data[end:]
        return data[:end]


def end_of_events(data: bytes) -> int:
    """Return the length of the whole events at the start of `data`."""
    return max((data.rfind(mark) + len(mark) for mark in ENDS if mark in data), default=0)
