"""One backend's part of a stream on its way to the client: whole updates are passed on as they arrive.

Made by `Carrier`, once for each backend that a stream has. Parts are written to the client where they arrive while the
client takes them; a client that is slow makes the carrier's task wait, and with it the backend.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.router.answer import BackendAnswer
from stoker.router.client import Client
from stoker.router.connection import BackendError
from stoker.router.kept_stream import KeptStream, NotResumable, UpdateCutter
from stoker.router.revision_counts import RevisionCounts

GONE_CODES = ("engine_lost", "aborted")
"""Error events of an engine that cannot finish a stream although its connection works: another one can."""


class Passing:
    """Passes on what one backend answers; a `Sink` of its connection."""

    def __init__(
        self, answer: BackendAnswer, kept: KeptStream, client: Client, clock: Callable[[], float],
        revisions: RevisionCounts,
    ) -> None:  # fmt: skip
        self.answer = answer
        self.kept = kept
        self.client = client
        self.clock = clock
        self.revisions = revisions
        self.sent = 0
        kept.last_byte_s = clock()
        self._cutter: UpdateCutter | None = UpdateCutter()
        """None: the marks did not come as promised; bytes pass as they are."""

    async def run(self) -> str | None:
        """Send whole updates until the stream ends; return the reason if it ends too early.

        Raises:
            BackendError: the connection broke, and the stream is not complete.
        """
        try:
            async for data in self.answer.body(self):
                await self.client.pass_on(self._noted(data))
        except BackendError:
            if self._cutter is None or not self._cutter.complete:
                raise
        if self._cutter is None:
            return None
        if self._cutter.error_code in GONE_CODES:
            return f"the engine ended the stream: {self._cutter.error_code}"
        await self.client.pass_on(self._counted(bytes(self._cutter.tail)))
        return None

    @property
    def open(self) -> bool:
        """Whether the client takes a part at once."""
        return self.client.open

    def add(self, part: bytes) -> None:
        """Write the updates that a part makes whole, where it arrives; only while `open`."""
        self.client.write(self._noted(part))

    def _noted(self, data: bytes) -> bytes:
        """Note bytes that have arrived; return the updates to send."""
        now_s = self.clock()
        if self.sent:
            self.revisions.gap(self.answer.backend.entry, now_s - self.kept.last_byte_s)
        self.kept.last_byte_s = now_s
        return self._counted(self._whole(data))

    def _whole(self, data: bytes) -> bytes:
        if self._cutter is None:
            return data
        try:
            whole = self._cutter.add(data)
        except NotResumable as reason:
            self.kept.give_up(str(reason))
            whole, self._cutter = bytes(self._cutter.tail), None
        return whole

    def _counted(self, data: bytes) -> bytes:
        """Note bytes that are sent now."""
        if data:
            self.kept.add(data)
            self.sent += len(data)
        return data
