"""Counts of requests by class: queue, seats, time in the queue, preemptions. Owned by the scheduler, read for stats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stoker.engine.core.request import Sequence as Choice
from stoker.engine.core.stats import ClassStats
from stoker.pod.histogram import Histogram


@dataclass
class ClassTally:
    """Counts of one class since the start."""

    queue_s: Histogram = field(default_factory=Histogram)
    queue_sum_s: float = 0.0
    preemptions: int = 0
    aged: int = 0


class ClassCounts:
    """Counts by the number of the class; only classes that a request had."""

    def __init__(self) -> None:
        self._tallies: dict[int, ClassTally] = {}

    def began(self, place: int, queued_s: float) -> None:
        """Count the time of a request from its arrival to its first step."""
        tally = self._tally(place)
        tally.queue_s.add(queued_s)
        tally.queue_sum_s += queued_s

    def preempted(self, place: int) -> None:
        self._tally(place).preemptions += 1

    def aged(self, place: int) -> None:
        """Count a request that went before all classes because it had waited too long."""
        self._tally(place).aged += 1

    def stats(self, waiting: Iterable[Choice], running: Iterable[Choice]) -> tuple[ClassStats, ...]:
        """The counts of all classes so far, in their order."""
        queued = Counter(one.request.place for one in waiting)
        seated = Counter(one.request.place for one in running)
        places: Sequence[int] = sorted({*self._tallies, *queued, *seated})
        return tuple(self._stats(place, queued[place], seated[place]) for place in places)

    def _stats(self, place: int, waiting: int, running: int) -> ClassStats:
        one = self._tallies.get(place, ClassTally())
        return ClassStats(place, waiting, running, one.preemptions, one.aged, one.queue_sum_s, dict(one.queue_s.counts))

    def _tally(self, place: int) -> ClassTally:
        return self._tallies.setdefault(place, ClassTally())
