"""Progress for people on standard error: one line that changes on a terminal, plain lines in a log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TextIO

TERMINAL_S = 0.1
LOG_S = 10.0
"""Between two lines about the same round."""


class BenchProgress:
    """Shows the stage that runs. Called with the numbers of answers and output tokens while a round runs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.terminal = stream.isatty()
        self._title, self._total = "", 0
        self._last_s = clock()

    def stage(self, text: str) -> None:
        """Show what begins now. Percentages of one stage are one line of a log."""
        title = re.sub(r" \d+ %", "", text)
        if self.terminal or title != self._title:
            self._title = title
            self._write(text)

    def begin_round(self, title: str, total: int) -> None:
        """Show that a round of `total` requests begins."""
        self._total = total
        self._last_s = self.clock()
        self.stage(title)

    def __call__(self, num_done: int, num_tokens: int) -> None:
        now_s = self.clock()
        if now_s - self._last_s >= (TERMINAL_S if self.terminal else LOG_S):
            self._last_s = now_s
            self._write(f"{self._title}: {num_done} of {self._total} requests, {num_tokens:,} output tokens")

    def clear(self) -> None:
        """Leave an empty line on a terminal, for figures or an error."""
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}" if self.terminal else f"{text}\n")
        self.stream.flush()
