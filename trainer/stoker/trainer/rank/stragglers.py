"""Stragglers: ranks that the others wait for step after step, found from the time that each rank computes. Pure.

Ranks meet at the end of every step, so all steps take equally long. What differs is the time until a rank arrives there
(`busy_s`). A rank is late in a step when it arrives `RATIO` times later than the median of its peers. Peers are ranks
with the same work: those of one pipeline stage.

A rank is named when it was late in `NAMED` of the last `WINDOW` steps, and no longer when it was in fewer than
`CLEARED`. Noise below `RATIO` thus names no rank ever. Where every rank is late in a share p of its steps by chance, a
window names one with the chance of `NAMED` hits among `WINDOW`: 4e-9 for p = 0.25 and 5e-18 for p = 0.1.

Held by the loop of the leading rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

WINDOW = 32
"""Steps that are looked at."""
NAMED = 24
CLEARED = 8
RATIO = 1.2
"""Time of a late rank over the median of its peers."""
SLACK_S = 0.001
"""Shorter differences count for nothing: clocks and schedulers of hosts differ by that much."""
MAX_NAMED = 16


@dataclass(frozen=True)
class Straggler:
    """One rank, with medians over the window."""

    rank: int
    busy_s: float
    typical_s: float
    """Median of its peers."""

    @property
    def ratio(self) -> float:
        return self.busy_s / self.typical_s if self.typical_s else 1.0


class StragglerWatch:
    """The last steps of every rank, and the ranks that are named. A step costs O(ranks)."""

    def __init__(self, peers: Iterable[Sequence[int]]) -> None:
        """`peers`: groups of ranks with the same work, which are compared with each other; each rank is in one."""
        self._peers = tuple(tuple(group) for group in peers)
        self._steps: deque[_Step] = deque()
        self._late: Counter[int] = Counter()
        """Late steps of the window, by rank."""
        self._named: frozenset[int] = frozenset()

    def add(self, busy_s: Sequence[float]) -> tuple[Straggler, ...] | None:
        """Take the times of one step, by rank. Return all stragglers where another rank is one now; else None.

        A step in which some rank has no time (0, before its first) is left out.
        """
        if not all(seconds > 0 for seconds in busy_s):
            return None
        self._push(self._judged(busy_s))
        named = frozenset(rank for rank, count in self._late.items() if self._is_named(rank, count))
        if named == self._named:
            return None
        self._named = named
        return tuple(self._straggler(rank) for rank in sorted(named)[:MAX_NAMED])

    def _judged(self, busy_s: Sequence[float]) -> _Step:
        """The step beside the medians of the groups; of two ranks the faster one is the median."""
        typical_s = [0.0] * len(busy_s)
        for group in self._peers:
            middle = median_low(busy_s[rank] for rank in group)
            for rank in group:
                typical_s[rank] = middle
        pairs = enumerate(zip(busy_s, typical_s, strict=True))
        return _Step(busy_s, typical_s, tuple(rank for rank, (busy, typical) in pairs if is_late(busy, typical)))

    def _push(self, step: _Step) -> None:
        self._steps.append(step)
        self._late.update(step.late)
        if len(self._steps) > WINDOW:
            self._late.subtract(self._steps.popleft().late)

    def _is_named(self, rank: int, count: int) -> bool:
        return count >= (CLEARED if rank in self._named else NAMED)

    def _straggler(self, rank: int) -> Straggler:
        busy_s = median(step.busy_s[rank] for step in self._steps)
        return Straggler(rank, busy_s, median(step.typical_s[rank] for step in self._steps))


@dataclass(frozen=True)
class _Step:
    """One step, by rank."""

    busy_s: Sequence[float]
    typical_s: Sequence[float]
    late: Sequence[int]
    """Numbers of the late ranks."""


def is_late(busy_s: float, typical_s: float) -> bool:
    """Whether one step of a rank is late beside the median of its peers."""
    return busy_s > max(RATIO * typical_s, typical_s + SLACK_S)
