"""The end of a test that takes longer than its limit."""

from __future__ import annotations

import signal
from types import FrameType

import pytest


class OutOfTime(BaseException):
    """The test took longer than its limit.

    Hypothesis takes an `Exception`, and pytest's own failure, for a fault of the case that it judges. It would judge
    that case again, now without a limit, and report a property that fails at times.
    """


def raise_out_of_time() -> None:
    """Let the alarm that pytest-timeout has set raise `OutOfTime`. Without an alarm, change nothing."""
    fail = signal.getsignal(signal.SIGALRM)
    if not callable(fail):
        return

    def end(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        try:
            fail(number, frame)
        except pytest.fail.Exception as failure:
            raise OutOfTime(failure.msg) from None

    signal.signal(signal.SIGALRM, end)
