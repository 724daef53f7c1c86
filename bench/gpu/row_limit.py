"""A time limit for a row of a bench; a row that exceeds it, or fails, gives way to the next one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class RowTooSlow(BaseException):
    """Raised when the row's time is over.

    It is no Exception, because measured code catches those itself.
    """


@contextmanager
def row_limit(seconds: float) -> Iterator[None]:
    """Raise RowTooSlow in the block after so many seconds.

    A wait for the device is not interrupted: the error comes as soon as it returns.

    Main thread only.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise RowTooSlow(f"no result within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(row: Callable[[], Result], seconds: float) -> Result | str:
    """Return the row, or the reason of its failure, so that the other rows still run."""
    try:
        with row_limit(seconds):
            return row()
    except (RowTooSlow, RuntimeError, AssertionError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:500]
