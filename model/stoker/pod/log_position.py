"""How far the log of a pod was read, so that a stream that was cut goes on without a lost or a doubled line.

Kubernetes notes a time before each line, and answers from a whole second on. A stream that is opened again repeats the
lines of that second; those that were read are passed over. Where a cluster notes no times, lines are counted from the
beginning of the log. Knows no cluster.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ?(.*)", re.DOTALL)
_FRACTION = re.compile(r"\.(\d+)")
_NS = 10**9
OVERLAP_S = 1
"""Seconds before that of the newest line which are read again: two streams of a container note lines out of order."""


class TimedLine(NamedTuple):
    """A line of a log. `time` is empty where the cluster notes none."""

    time: str
    text: str
    instant_ns: int = 0
    """The time in nanoseconds from 1970."""


class LogRequest(NamedTuple):
    """The part of a log that is asked for."""

    tail: int | None = None
    """Only so many last lines of what is there."""
    since_s: int | None = None
    """Only lines of the last so many seconds."""
    since_time: str = ""
    """Only lines from this time on (RFC 3339); clusters take whole seconds."""

    @property
    def query(self) -> dict[str, str]:
        """The parameters of Kubernetes' API."""
        return {
            **({"tailLines": str(self.tail)} if self.tail is not None else {}),
            **({"sinceSeconds": str(self.since_s)} if self.since_s is not None else {}),
            **({"sinceTime": self.since_time} if self.since_time else {}),
        }


class LogPosition:
    """The place in the log of one pod up to which it was read.

    Args:
        asked: what the first stream asks for.
    """

    def __init__(self, asked: LogRequest, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.asked, self._monotonic = asked, monotonic
        self._opened_at: float | None = None
        self._recent: dict[int, Counter[TimedLine]] = {}
        """Lines that a stream may repeat, by the second of their time."""
        self._repeated: Counter[TimedLine] = Counter()
        """Of those, what the stream of now has not repeated yet."""
        self._from_second = 0
        """Lines before it were read by an earlier stream."""
        self._from_ns = 0
        """Lines before it are older than what was asked for."""
        self._before_ns = 0
        self._num_untimed = self._num_passed = 0

    @property
    def can_go_on(self) -> bool:
        """Whether another stream can begin where this one ended: not behind a tail of lines without times."""
        return not (self._num_untimed and self._limited)

    @property
    def is_exact(self) -> bool:
        """Whether another stream surely repeats nothing: a tail that showed nothing may hide lines without times."""
        return bool(self._recent) or not self._limited

    @property
    def since_time(self) -> str:
        """The time from which another stream must read; empty where nothing with a time was read."""
        if not self._recent:
            return ""
        return f"{datetime.fromtimestamp(max(self._recent) - OVERLAP_S, UTC):%Y-%m-%dT%H:%M:%SZ}"

    def request(self) -> LogRequest:
        """Return what a stream that is opened now must ask for."""
        if self._opened_at is None:
            return self.asked
        if since := self.since_time:
            return LogRequest(since_time=since)
        elapsed_s = max(1, math.ceil(self._monotonic() - self._opened_at))
        since_s = None if self.asked.since_s is None else self.asked.since_s + elapsed_s
        return LogRequest(since_s=elapsed_s if self.asked.tail == 0 else since_s, since_time=self.asked.since_time)

    def missing(self) -> None:
        """Note that there is no log yet: what it will hold was written after it was asked for."""
        if self._opened_at is None:
            self.asked = LogRequest()

    def opened(self) -> None:
        """Note that a stream begins, with what `request` asked for."""
        if self._opened_at is None:
            self._opened_at = self._monotonic()
        self._num_passed = self._before_ns = 0
        if self._recent:
            self._from_second = max(self._recent) - OVERLAP_S
            self._repeated = sum(self._recent.values(), Counter())

    def new_lines(self, lines: Iterable[str]) -> list[TimedLine]:
        """Return those of the stream's next lines that no earlier stream had."""
        return [found for line in lines if self._is_new(found := timed(line))]

    def _is_new(self, line: TimedLine) -> bool:
        if not line.time and not self._recent:
            return self._is_new_by_number()
        self._before_ns = line.instant_ns or self._before_ns  # a line without a time belongs to the one before it
        second = self._before_ns // _NS
        if second < self._from_second or self._before_ns < self._from_ns:
            return False
        if self._repeated[line]:
            self._repeated[line] -= 1
            return False
        self._note(second, line)
        return True

    def _is_new_by_number(self) -> bool:
        self._num_passed += 1
        new = self._num_passed > self._num_untimed
        self._num_untimed = max(self._num_untimed, self._num_passed)
        return new

    def _note(self, second: int, line: TimedLine) -> None:
        if not self._recent and self._limited:
            self._from_ns = self._before_ns
        if second not in self._recent:
            first = max(second, *self._recent) - OVERLAP_S if self._recent else second
            self._recent = {at: lines for at, lines in self._recent.items() if at >= first}
        self._recent.setdefault(second, Counter())[line] += 1

    @property
    def _limited(self) -> bool:
        return self.asked != LogRequest()


def timed(line: str) -> TimedLine:
    """Split a line into its time and its text."""
    found = _TIMED.fullmatch(line)
    try:
        return TimedLine(found[1], found[2], instant_ns(found[1])) if found else TimedLine("", line)
    except ValueError:  # no day of the calendar: the program's own words
        return TimedLine("", line)


def instant_ns(noted: str) -> int:
    """Return the nanoseconds from 1970 to a time that a cluster noted (RFC 3339, in any zone). Raises ValueError."""
    fraction = _FRACTION.search(noted)
    whole = datetime.fromisoformat(_FRACTION.sub("", noted))
    return int(whole.timestamp()) * _NS + int(f"{fraction[1][:9]:0<9}" if fraction else 0)
