"""Metrics of request classes in an engine: who waits, for how long, who was preempted. Read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from stoker.engine.core.stats import ClassStats, Stats
from stoker.pod.histogram import RATIO

LABELS = ("model_name", "engine", "request_class")
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Upper bounds of the histogram. The core's buckets are known within 10 %, so a value near a bound may count above."""


def class_metrics(labels: tuple[str, str], stats: Stats) -> Iterator[Metric]:
    """Gauges, counters and the time in the queue, by the number of the class."""
    waiting = GaugeMetricFamily("stoker:class_requests_waiting", "Requests in the queue by class.", labels=LABELS)
    running = GaugeMetricFamily("stoker:class_requests_running", "Sequences that hold blocks by class.", labels=LABELS)
    preempted = CounterMetricFamily("stoker:class_preemptions", "Preempted sequences by class.", labels=LABELS)
    aged = CounterMetricFamily("stoker:class_aged", "Requests that went first because of their age.", labels=LABELS)
    queue_s = HistogramMetricFamily("stoker:class_queue_seconds", "From arrival to the first step.", labels=LABELS)
    for one in stats.classes:
        own = (*labels, str(one.place))
        waiting.add_metric(own, one.waiting)
        running.add_metric(own, one.running)
        preempted.add_metric(own, one.preemptions)
        aged.add_metric(own, one.aged)
        queue_s.add_metric(own, _buckets(one), one.queue_sum_s)
    yield from (waiting, running, preempted, aged, queue_s)


def _buckets(one: ClassStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    whole = sum(one.queue_s.values())
    return [*((str(bound), _within(one.queue_s, bound)) for bound in SECONDS), ("+Inf", whole)]


def _within(counts: Mapping[int, int], bound_s: float) -> int:
    return sum(count for bucket, count in counts.items() if RATIO**bucket <= bound_s)
