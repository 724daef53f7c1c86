"""A Ctrl-C that comes while a finalizer runs."""

from __future__ import annotations

import os
import signal

import pytest

from stoker.cli.interruption import Interruption


class Dropping:
    """Gets Ctrl-C in its finalizer, in which Python drops the exception."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_interrupt_comes_again_at_the_next_pause() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.sleep(0)
        found = Dropping()
        del found
        with pytest.raises(KeyboardInterrupt):
            interruption.sleep(60)
    assert signal.getsignal(signal.SIGINT) is before
