"""Seconds of each part of an engine's start-up, for the log and `/status`. One thread writes, another reads.

Made and written by `core`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("stoker.engine")


class Startup:
    """The parts so far. They follow one another; the first began with the process."""

    def __init__(self, clock: Callable[[], float], importing_s: float | None) -> None:
        """`importing_s`: age of the process, where it is known."""
        self.clock = clock
        self.seconds: dict[str, float] = {}
        if importing_s is not None:
            self.seconds["Importing"] = round(importing_s, 3)
        self._part = ""
        self._began_s = clock()

    def enter(self, part: str) -> None:
        """Begin a part, which ends the one before. The same name again changes nothing; an empty name ends the last
        part."""
        if part == self._part:
            return
        now_s = self.clock()
        if self._part:
            took_s = self.seconds.get(self._part, 0.0) + now_s - self._began_s
            self.seconds = self.seconds | {self._part: round(took_s, 3)}
            log.info("%s took %.2f s", self._part, took_s)
        self._part, self._began_s = part, now_s


def process_age_s() -> float | None:
    """Seconds since this process was started; None on systems without /proc."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not stat.exists() or not uptime.exists():
        return None
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22: its start, in ticks after boot
    return max(0.0, float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
