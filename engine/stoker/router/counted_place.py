"""A place that computes requests, in the view of one router: the requests that it sent there, and the newest report.

The base of `Backend`, a pod as one, and of `DataRank`, one of several in a pod: policies choose among both, and both
count alike. Lives in one event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stoker.router.load import YOUNG_S, Load
from stoker.router.snapshot import Role
from stoker.router.standing import Standing, standing_of


class CountedPlace:
    """Counts requests, and keeps what follows from them and from the report."""

    def __init__(self, role: Role, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.role = role
        """The role that it prefers now."""
        self.report: Load | None = None
        """The newest one, however old, without this router's requests that have their first byte since."""
        self._reports = 0
        """Number of reports so far."""
        self._young_until_s = -math.inf
        self._standing: Standing | None = None
        """None: a cause has changed since it was computed."""
        self._stands_until_s = math.inf
        """When a report that is one of its causes grows old."""
        self._pending = 0
        self.unstarted: Sequence[int] = ()
        """Prompt tokens of this router's requests without a first byte, about, in the order of dispatch."""
        self._unstarted: dict[object, int] = {}

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        return self._pending

    @pending.setter
    def pending(self, number: int) -> None:
        self._pending, self._standing = number, None

    @property
    def load(self) -> Load | None:
        """The newest report, while it is young."""
        return self.report if self.clock() <= self._young_until_s else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second by its newest report, however old; None before it has measured them."""
        return self.report.measured_rate if self.report is not None else None

    @property
    def standing(self) -> Standing:
        """What `standing_of` computes of it now; kept until a cause changes or the report is no longer young."""
        kept = self._standing
        if kept is None or self.clock() > self._stands_until_s:
            return self._stand()
        return kept

    def _stand(self) -> Standing:
        load = self.load
        self._standing = standing_of(self)
        self._stands_until_s = math.inf if load is None else self._young_until_s
        return self._standing

    def prefer(self, role: Role) -> None:
        """Take the role that it prefers from now on."""
        self.role, self._standing = role, None

    def take(self, load: Load) -> None:
        """Take a newer report."""
        self.report, self._reports = load, self._reports + 1
        self._young_until_s = self.clock() + YOUNG_S
        self._stand()  # now, so that a decision does not do it for each place

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Count the prompt of a request until its first byte; a report that came meanwhile counts it no longer then."""
        request, before = object(), self._reports
        self._unstarted[request] = tokens
        self._count_unstarted()
        try:
            yield
        finally:
            del self._unstarted[request]
            if self.report is not None and self._reports > before:
                self.report = self.report.less_one(tokens)
            self._count_unstarted()

    def _count_unstarted(self) -> None:
        self.unstarted, self._standing = tuple(self._unstarted.values()), None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request as pending."""
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1
