"""The leader's calls about the ranks' parts of cache blocks, and their ends.

A call goes to one rank or to all, in order with the steps. Its ticket has ended when the rank has reported it. One for
each executor, used by the core's thread; other reports go to who listens.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Protocol

from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.block_calls import BlockCall, BlockReport, CallEnded, MovesBlocks
from stoker.engine.transfer.ticket import TransferError

POLL_S = 0.05
InOrder = Callable[[Callable[[], None]], "Future[None]"]
"""Calls something in rank 0's thread, behind the steps that were submitted."""


class FurtherRanks(Protocol):
    """What carries calls to the ranks behind rank 0, and their reports back."""

    block_reports: queue.SimpleQueue[tuple[int, BlockReport | BaseException]]

    def send_to(self, rank: int, message: BlockCall) -> None:
        """Send a call to one of them, behind the steps that were sent."""
        ...

    def check(self) -> None:
        """Raise ExecutorLost if a rank is lost."""
        ...


class CallTicket:
    """A call of one rank."""

    bytes = 0

    def __init__(self, calls: RankCalls, number: int, on_end: Callable[[CallEnded], None]) -> None:
        self._calls, self.number, self.on_end = calls, number, on_end
        self.ended: CallEnded | None = None

    @property
    def seconds(self) -> float:
        return self.ended.seconds if self.ended is not None else 0.0

    def done(self) -> bool:
        self._calls.read_reports()
        return self.ended is not None

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 - until it ends, or a rank is lost
        self._calls.wait(self.done)
        return True

    def error(self) -> TransferError | None:
        return TransferError(self.ended.error) if self.ended is not None and self.ended.error else None

    def cancel(self) -> None:
        """It goes on."""


class RankCalls:
    """Calls to the ranks of one executor."""

    def __init__(self, num_ranks: int, further: FurtherRanks, in_order: InOrder) -> None:
        self.num_ranks, self._further, self._in_order = num_ranks, further, in_order
        self.own: MovesBlocks | None = None
        """What carries rank 0's calls out, in its thread."""
        self._reports = further.block_reports
        self.listeners: list[Callable[[int, BlockReport], None]] = []
        """Called with the reports that end no call."""
        self._numbers = count(1)
        self._open: dict[int, CallTicket] = {}

    def call(self, rank: int, call: BlockCall) -> None:
        """Let a rank do something behind the steps that were submitted."""
        if rank:
            self._further.send_to(rank, call)
            return
        own = self.own
        assert own is not None, "given where the engine is built"
        self._in_order(lambda: own.do(call)).add_done_callback(self._note_failure)

    def report(self, report: BlockReport) -> None:
        """Take a report of rank 0; for any thread."""
        self._reports.put((0, report))

    def _note_failure(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self._reports.put((0, error))

    def begin(
        self, rank: int, call: Callable[[int], BlockCall], on_end: Callable[[CallEnded], None] = lambda _: None
    ) -> CallTicket:
        """Begin a call that is reported when it has ended. `call` makes it from its number."""
        ticket = CallTicket(self, next(self._numbers), on_end)
        self._open[ticket.number] = ticket
        self.call(rank, call(ticket.number))
        return ticket

    def begin_all(self, call: Callable[[int, int], BlockCall]) -> list[CallTicket]:
        """Begin a call on every rank. `call` makes it from the rank and its number."""
        return [self.begin(rank, partial(call, rank)) for rank in range(self.num_ranks)]

    def wait(self, condition: Callable[[], bool], poll_s: float = POLL_S) -> None:
        """Wait for what reports bring. Raises ExecutorLost where a rank is lost before."""
        while not condition():
            self._further.check()
            try:
                rank, report = self._reports.get(timeout=poll_s)
            except queue.Empty:
                continue
            self._take(rank, report)

    def settle(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for what reports bring, but no longer. Raises ExecutorLost as `wait`."""
        until_s = time.monotonic() + timeout_s
        self.wait(lambda: condition() or time.monotonic() >= until_s, min(timeout_s, POLL_S))

    def read_reports(self) -> None:
        """Take what the ranks have reported since the last call."""
        while True:
            try:
                rank, report = self._reports.get_nowait()
            except queue.Empty:
                return
            self._take(rank, report)

    def _take(self, rank: int, report: BlockReport | BaseException) -> None:
        if isinstance(report, BaseException):
            lost = isinstance(report, ExecutorLost)
            raise report if lost else ExecutorLost(f"rank {rank}: {type(report).__name__}: {report}") from report
        if isinstance(report, CallEnded):
            ticket = self._open.pop(report.call)
            ticket.ended = report
            ticket.on_end(report)
            return
        for listener in self.listeners:
            listener(rank, report)

    def close(self) -> None:
        """End rank 0's part; the others end with their ranks."""
        if self.own is not None:
            self.own.close()
