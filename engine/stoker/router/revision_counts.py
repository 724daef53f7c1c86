"""What the router measures of each revision: answers, errors, first tokens, gaps; in total and in the present window.

A window begins when the operator names a new one in a snapshot. Its counts begin at zero then for every revision, so
two revisions are compared over the same time. `/status` has the window, `/metrics` the totals since the start.

Made once by `RouterMetrics`; `Proxy` and `Carrier` record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.pod.histogram import RATIO, Histogram, bucket_of, merged
from stoker.router.engine_counts import EngineCounts
from stoker.router.snapshot import BackendEntry

EDGES = range(-72, 73, 8)
"""Exponents of the exported buckets' bounds, from 1 ms to 16 minutes: bounds of `Histogram`, so counts are exact."""
Place = tuple[str, str]
"""Revision and pool."""


@dataclass
class Counts:
    """One revision in one pool. Times in seconds."""

    requests: int = 0
    """Answers, and attempts without one."""
    errors: int = 0
    """Answers with 500 or above, attempts without an answer, and answers that broke off."""
    first_token_s: Histogram = field(default_factory=Histogram)
    """Of streams: from the request to the first byte of the body."""
    token_gap_s: Histogram = field(default_factory=Histogram)
    """Between two parts of a stream."""
    queue_s: Histogram = field(default_factory=Histogram)
    """In engines' queues, by their reports, of the requests of all routers."""
    splits: int = 0
    """Requests whose prompt another engine was to compute, by the engines' reports, of all routers."""
    failed_splits: int = 0
    """Those of them whose transfer failed: the engine that answers computed the prompt itself."""
    first_token_sum_s: float = 0.0
    token_gap_sum_s: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "errors": self.errors,
            "first_token_s": self.first_token_s.to_wire(),
            "token_gap_s": self.token_gap_s.to_wire(),
            "queue_s": self.queue_s.to_wire(),
            "splits": self.splits,
            "failed_splits": self.failed_splits,
        }


class RevisionCounts(Collector):
    """Counts of all revisions. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.window = ""
        self._began_s = clock()
        self._totals: dict[Place, Counts] = {}
        self._in_window: dict[Place, Counts] = {}

    def begin(self, window: str) -> None:
        """Begin a window; the one that runs already goes on."""
        if window != self.window:
            self.window, self._began_s = window, self.clock()
            self._in_window = {}

    def answered(self, entry: BackendEntry, status: int, first_token_s: float | None) -> None:
        """Count an answer that has begun; `first_token_s` of a stream."""
        for counts in self._both(entry):
            counts.requests += 1
            counts.errors += status >= 500
            if first_token_s is not None and status < 400:
                counts.first_token_s.add(first_token_s)
                counts.first_token_sum_s += first_token_s

    def unanswered(self, entry: BackendEntry) -> None:
        """Count a request that a backend did not answer, although another one may."""
        for counts in self._both(entry):
            counts.requests += 1
            counts.errors += 1

    def broke_off(self, entry: BackendEntry) -> None:
        """Count an answer that broke off, although another backend may go on with it."""
        for counts in self._both(entry):
            counts.errors += 1

    def gap(self, entry: BackendEntry, seconds: float) -> None:
        """Count the time between two parts of a stream."""
        bucket = bucket_of(seconds)
        for counts in self._both(entry):
            counts.token_gap_s.put(bucket)
            counts.token_gap_sum_s += seconds

    def reported(self, entry: BackendEntry, added: EngineCounts) -> None:
        """Count what an engine has reported."""
        for counts in self._both(entry):
            counts.queue_s = merged((counts.queue_s, added.queue_s))
            counts.splits += added.splits
            counts.failed_splits += added.failed_splits

    def status(self) -> Mapping[str, Any]:
        """Return the field `window` of `/status`."""
        found = [
            {"revision": revision, "pool": pool, **counts.to_wire()}
            for (revision, pool), counts in sorted(self._in_window.items())
        ]
        return {"id": self.window, "seconds": round(self.clock() - self._began_s), "revisions": found}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the labels revision and pool."""
        name, labels = "stoker_router_revision", ["revision", "pool"]
        requests = CounterMetricFamily(f"{name}_requests", "Answers and attempts by revision.", labels=labels)
        errors = CounterMetricFamily(f"{name}_errors", "Failed ones: 5xx, none, or broken off.", labels=labels)
        first = HistogramMetricFamily(f"{name}_first_token_seconds", "First token of streams.", labels=labels)
        gaps = HistogramMetricFamily(f"{name}_token_gap_seconds", "Between parts of streams.", labels=labels)
        queue = GaugeMetricFamily(f"{name}_queue_p95_seconds", "In engines' queues, since the start.", labels=labels)
        splits = CounterMetricFamily(f"{name}_splits", "Prompts for another engine, by its report.", labels=labels)
        failed = CounterMetricFamily(f"{name}_failed_splits", "Those whose transfer failed.", labels=labels)
        for place, counts in sorted(self._totals.items()):
            splits.add_metric(place, counts.splits)
            failed.add_metric(place, counts.failed_splits)
            requests.add_metric(place, counts.requests)
            errors.add_metric(place, counts.errors)
            first.add_metric(place, _buckets(counts.first_token_s), counts.first_token_sum_s)
            gaps.add_metric(place, _buckets(counts.token_gap_s), counts.token_gap_sum_s)
            if (p95_s := counts.queue_s.quantile(0.95)) is not None:
                queue.add_metric(place, p95_s)
        yield from (requests, errors, first, gaps, queue, splits, failed)

    def _both(self, entry: BackendEntry) -> tuple[Counts, Counts]:
        place = entry.revision, entry.pool
        return _at(self._totals, place), _at(self._in_window, place)


def _at(counts: dict[Place, Counts], place: Place) -> Counts:
    """The counts of a place, made when they are first needed: each part of a stream asks for them."""
    found = counts.get(place)
    if found is None:
        found = counts[place] = Counts()
    return found


def _buckets(found: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [
        (f"{RATIO**edge:.6g}", float(sum(n for bucket, n in found.counts.items() if bucket <= edge))) for edge in EDGES
    ]
    return [*bounds, ("+Inf", float(found.total))]
