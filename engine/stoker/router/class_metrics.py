"""Prometheus metrics by request class. Made once by `RouterMetrics`; `Admission` records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.router.lanes import Outlook

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


class ClassMetrics(Collector):
    """Counts by class. Times in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "stoker_router_class_requests", "Requests by class: admitted, or the code of the refusal.",
            ["request_class", "outcome"], registry=registry,
        )  # fmt: skip
        self.queue_s = Histogram(
            "stoker_router_class_queue_seconds", "Time that admitted requests waited in the router.",
            ["request_class"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.predicted_s = Histogram(
            "stoker_router_class_predicted_seconds", "Predicted first token of admitted requests.",
            ["request_class"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_byte_s = Histogram(
            "stoker_router_class_first_byte_seconds", "From a request to the first byte of its stream.",
            ["request_class"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.late = Counter(
            "stoker_router_class_late", "Streams whose first byte came later than the goal of their class.",
            ["request_class"], registry=registry,
        )  # fmt: skip
        self.queued: Callable[[], Mapping[str, int]] = dict
        """Requests that wait, by class."""
        registry.register(self)

    def admitted(self, name: str, waited_s: float, outlook: Outlook) -> None:
        self.requests.labels(name, "admitted").inc()
        self.queue_s.labels(name).observe(waited_s)
        if outlook.queue_s < float("inf"):
            self.predicted_s.labels(name).observe(outlook.first_token_s)

    def refused(self, name: str, code: str) -> None:
        self.requests.labels(name, code).inc()

    def began(self, name: str, first_byte_s: float, goal_s: float | None) -> None:
        """Count a stream that has begun `first_byte_s` after the request."""
        self.first_byte_s.labels(name).observe(first_byte_s)
        if goal_s is not None and first_byte_s > goal_s:
            self.late.labels(name).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge of requests that wait."""
        gauge = GaugeMetricFamily(
            "stoker_router_class_queued_requests", "Requests that wait by class.", labels=["request_class"]
        )
        for name, number in self.queued().items():
            gauge.add_metric([name], number)
        yield gauge
