"""A Ctrl-C that is not lost. Called by the commands that follow a cluster.

Python drops an exception that is raised while a finalizer runs, and with it the KeyboardInterrupt of a Ctrl-C at such a
moment. A command that polls would then go on for ever.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Remembers SIGINT while it is entered, and raises KeyboardInterrupt again at the next pause."""

    def __init__(self) -> None:
        self._interrupted = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def sleep(self, seconds: float) -> None:
        """Pause.

        Raises:
            KeyboardInterrupt: Ctrl-C came now, or earlier and was dropped.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        time.sleep(seconds)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt
