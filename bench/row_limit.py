"""A row of a bench that takes too long, or fails, gives way to the next one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class RowTooSlow(BaseException):
    """The row's time is over. No Exception, because what is measured keeps those for itself."""


@contextmanager
def row_limit(seconds: float) -> Iterator[None]:
    """Raises RowTooSlow in the block after so many seconds; while the device is waited for, as soon as that returns.

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
    """The row, or why there is none: the other rows are wanted all the same."""
    try:
        with row_limit(seconds):
            return row()
    except (RowTooSlow, RuntimeError, AssertionError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:500]
