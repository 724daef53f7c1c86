"""Prometheus metrics of the router: counters that the proxy increments, and gauges of the backends.

The gauges are read from `Backends` at each scrape. Made once by `Router`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, Summary
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.router.backends import Backends
from stoker.router.revision_counts import RevisionCounts

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class RouterMetrics:
    """Counters for what happened; gauges are read from the backends when they are scraped."""

    def __init__(self, registry: CollectorRegistry, backends: Backends) -> None:
        self.requests = Counter("stoker_router_requests", "Answers by status code.", ["code"], registry=registry)
        self.retries = Counter("stoker_router_retries", "Requests sent again to another backend.", registry=registry)
        self.cut = Counter("stoker_router_cut_answers", "Answers that broke in the middle.", registry=registry)
        self.split = Counter(
            "stoker_router_split_requests", "Requests sent with the address of an engine that computes their prompt.",
            registry=registry,
        )  # fmt: skip
        self.resumed = Counter("stoker_router_resumed_streams", "Streams that went on elsewhere.", registry=registry)
        self.resume_gap = Histogram(
            "stoker_router_resume_seconds", "From the break of a stream to its next update, from another backend.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.lost = Counter(
            "stoker_router_lost_streams", "Streams that ended with backend_lost, by reason.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.not_kept = Counter(
            "stoker_router_streams_not_kept", "Streams that cannot go on elsewhere: max_resume_bytes is reached.",
            registry=registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "stoker_router_fallback_requests", "Requests that another deployment got: no engine could take them.",
            ["deployment"], registry=registry,
        )  # fmt: skip
        self.passed_on = Counter(
            "stoker_router_passed_on_requests", "Requests for a model of another deployment, sent there.",
            ["deployment"], registry=registry,
        )  # fmt: skip
        self.left = Counter("stoker_router_client_disconnects", "Clients that left before the end.", registry=registry)
        self.first_byte = Histogram(
            "stoker_router_first_byte_seconds", "From a request to the first byte of its answer.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.request_bytes = Summary("http_request_size_bytes", "Bodies of forwarded requests.", registry=registry)
        self.response_bytes = Summary("http_response_size_bytes", "Bodies of relayed answers.", registry=registry)
        ProcessCollector(registry=registry)
        self.revisions = RevisionCounts(backends.clock)
        """What canaries are judged by."""
        backends.counted = self.revisions.reported
        registry.register(self.revisions)
        self.held = 0
        """Requests that wait for a backend."""
        registry.register(_Gauges(self, backends))


class _Gauges(Collector):
    def __init__(self, metrics: RouterMetrics, backends: Backends) -> None:
        self.metrics = metrics
        self.backends = backends

    def collect(self) -> Iterator[Metric]:
        backends = self.backends.all
        yield GaugeMetricFamily("stoker_router_held_requests", "Requests that wait for a backend.", self.metrics.held)
        yield GaugeMetricFamily("stoker_router_snapshot_version", "Version in use.", self.backends.version)
        yield GaugeMetricFamily("stoker_router_ready_backends", "Backends that get requests.", len(self.backends.ready))
        pending = GaugeMetricFamily("stoker_router_pending_requests", "Unfinished requests.", labels=["backend"])
        healthy = GaugeMetricFamily("stoker_router_backend_healthy", "1: the last probe was good.", labels=["backend"])
        for backend in backends:
            pending.add_metric([backend.entry.url], backend.pending)
            healthy.add_metric([backend.entry.url], float(backend.healthy))
        yield pending
        yield healthy
