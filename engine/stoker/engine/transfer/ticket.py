"""Tickets of transfers under way, their errors, and the measured speed of a link."""

from __future__ import annotations

import threading
import time
from typing import Protocol

RECENT = 0.2
"""Weight of the newest transfer in the measured speed."""


class TransferError(Exception):
    """A transfer did not happen, or not in full."""


class PeerLost(TransferError):
    """The peer's process or connection is gone. Its landing zone may not be written any more."""


class Ticket(Protocol):
    """One transfer under way."""

    bytes: int
    """Size of all its blocks."""

    @property
    def seconds(self) -> float:
        """From its start to its end; to now while it is under way."""
        ...

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end. False: it is still under way."""
        ...

    def error(self) -> TransferError | None:
        """Why it failed; None for one that is under way or has ended well."""
        ...

    def cancel(self) -> None:
        """Leave it out if it has not begun. One that has begun goes on."""
        ...


class SummedTicket(Ticket, Protocol):
    """A transfer to or from a tier."""

    sums: list[int]
    """Raw checksum of each block, in the order of the moves, once it has ended well: of the block that was written to
    the tier, or of what was stored in the cache."""


class ThreadTicket:
    """One transfer, completed by the thread that carries it out."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = num_bytes
        self.sums: list[int] = []
        self._begun_s = time.perf_counter()
        self._ended_s: float | None = None
        self._error: TransferError | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._started = self._cancelled = False

    @property
    def seconds(self) -> float:
        return (self._ended_s or time.perf_counter()) - self._begun_s

    def done(self) -> bool:
        return self._end.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._end.wait(timeout_s)

    def error(self) -> TransferError | None:
        return self._error if self.done() else None

    def cancel(self) -> None:
        with self._lock:
            if not self._started:
                self._cancelled = True

    def start(self) -> bool:
        """Whether to carry it out. Called once, by the thread; False for one that was cancelled, which ends here."""
        with self._lock:
            self._started = not self._cancelled
        if self._cancelled:
            self.complete(TransferError("cancelled"))
        return self._started

    def complete(self, error: TransferError | None = None) -> None:
        """End it. A second end is ignored."""
        with self._lock:
            if self._end.is_set():
                return
            self._error, self._ended_s = error, time.perf_counter()
            self._end.set()


class LinkMeter:
    """What a link has carried, and how fast. Changed by one thread, read by others."""

    def __init__(self) -> None:
        self.bytes = 0
        self.transfers = 0
        self.failures = 0
        self.seconds = 0.0
        """Sum of the transfers' own times."""
        self.bytes_per_s: float | None = None
        """Moving average over transfers; None before the first."""

    def record(self, num_bytes: int, seconds: float) -> None:
        self.bytes += num_bytes
        self.transfers += 1
        self.seconds += seconds
        rate = num_bytes / max(seconds, 1e-9)
        self.bytes_per_s = rate if self.bytes_per_s is None else self.bytes_per_s + RECENT * (rate - self.bytes_per_s)
