"""The operator's metrics for Prometheus.

Made by `service/program`, updated by the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stoker.operator.domain.autoscaling.decision import PoolInput
from stoker.operator.domain.autoscaling.record import BLOCKING, PoolScaling
from stoker.operator.domain.plan import Key
from stoker.operator.loop.node_watch import NodeCounts

PoolReview = tuple[Key, str, PoolInput, PoolScaling]
"""Deployment, pool, and what the autoscaler saw and decided."""
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class OperatorMetrics:
    """The metrics of one process. The state of a leader is read when Prometheus asks, through `watch`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._passes = Histogram(
            "stoker_operator_reconcile_seconds", "Time of one pass over one resource, with its writes",
            ["kind"], buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._failures = Counter(
            "stoker_operator_reconcile_failures", "Passes that ended in an error and are tried again",
            ["kind", "reason"], registry=self.registry,
        )  # fmt: skip
        self._requests = Histogram(
            "stoker_operator_api_request_seconds", "Requests to the API server, watches not counted",
            ["method", "resource", "code"], buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._leader = Gauge("stoker_operator_leader", "1 while this replica works", registry=self.registry)
        self._wake_ups = Counter("stoker_operator_wake_ups", "Changes that Kopf reported", registry=self.registry)

    def reconciled(self, kind: str, seconds: float, problem: str | None) -> None:
        """Count a pass; `problem` is the name of its error."""
        self._passes.labels(kind).observe(seconds)
        if problem is not None:
            self._failures.labels(kind, problem).inc()

    def requested(self, method: str, resource: str, code: int, seconds: float) -> None:
        """Count a request to the API server; code 0 when it did not answer."""
        self._requests.labels(method, resource, str(code)).observe(seconds)

    def woken(self) -> None:
        self._wake_ups.inc()

    def lead(self, leading: bool) -> None:
        self._leader.set(1 if leading else 0)

    def watch(self, state: Callable[[], OperatorState | None]) -> None:
        """Register gauges that read the state of the operator at work; None while none is at work here."""
        self.registry.register(_AtWork(state))


class OperatorState:
    """State of the operator at work, at one moment."""

    def __init__(
        self,
        *,
        queue: int,
        delayed: int,
        polls: int,
        objects: Mapping[str, int],
        silence_s: Mapping[str, float],
        nodes: NodeCounts,
        jobs: Mapping[Key, Mapping[str, int]] | None = None,
        starts: Mapping[Key, Mapping[str, int]] | None = None,
        engine_starts: Mapping[Key, Mapping[str, int]] | None = None,
        stragglers: Mapping[Key, int] | None = None,
        pools: Sequence[PoolReview] = (),
    ) -> None:
        """`jobs`: seconds of each TrainingJob by the state of its goodput ledger. `starts`: seconds of each part of the
        start of its newest attempt. `engine_starts`: the same of the newest replica of each EnginePool. `stragglers`:
        their number, of jobs that have some. `pools`: their newest reviews.
        """
        self.queue = queue
        self.delayed = delayed
        self.polls = polls
        self.objects = objects
        self.silence_s = silence_s
        self.nodes = nodes
        self.jobs = jobs or {}
        self.starts = starts or {}
        self.engine_starts = engine_starts or {}
        self.stragglers = stragglers or {}
        self.pools = pools


class _AtWork(Collector):
    def __init__(self, state: Callable[[], OperatorState | None]) -> None:
        self.state = state

    def collect(self) -> Iterator[Metric]:
        now = self.state()
        if now is None:
            return
        single = {
            "queue_depth": ("Resources that wait for a pass", now.queue),
            "queue_delayed": ("Resources with a pass at a later time", now.delayed),
            "polls_running": ("Polls of pods under way", now.polls),
            "nodes_silent": ("Nodes with pods whose heartbeats stay away", now.nodes.silent),
            "nodes_in_outage": (
                "Silent nodes that do not count as lost, because too many are silent",
                now.nodes.in_outage,
            ),
        }
        for name, (text, value) in single.items():
            yield GaugeMetricFamily(f"stoker_operator_{name}", text, value=value)
        text = "Outages: so many nodes were silent at once that none counted as lost"
        yield CounterMetricFamily("stoker_operator_node_outages", text, value=now.nodes.outages)
        objects = GaugeMetricFamily("stoker_operator_objects", "Objects that the operator knows", labels=["kind"])
        for kind, count in sorted(now.objects.items()):
            objects.add_metric([kind], count)
        yield objects
        silence = GaugeMetricFamily(
            "stoker_operator_watch_silence_seconds", "Since the last list, event or bookmark", labels=["kind"]
        )
        for kind, seconds in sorted(now.silence_s.items()):
            silence.add_metric([kind], seconds)
        yield silence
        yield _seconds_by(
            "trainingjob_seconds", "Seconds of a TrainingJob by what they were spent on", "state", now.jobs
        )
        text = "Seconds from the opening of the newest attempt of a TrainingJob to its first step, by part"
        yield _seconds_by("trainingjob_startup_seconds", text, "part", now.starts)
        text = "Seconds from the creation of the newest replica of an EnginePool until it was ready, by part"
        yield _seconds_by("enginepool_startup_seconds", text, "part", now.engine_starts)
        yield _stragglers(now.stragglers)
        yield from _pool_figures(now.pools)

    def describe(self) -> list[Metric]:
        return []


def _seconds_by(name: str, text: str, label: str, found_s: Mapping[Key, Mapping[str, int]]) -> Metric:
    """Seconds of each resource by one label; they add up to a whole."""
    labels = ["namespace", "name", label]
    found = GaugeMetricFamily(f"stoker_operator_{name}", f"{text}; they add up", labels=labels)
    for key, seconds in sorted(found_s.items()):
        for part, value in seconds.items():
            found.add_metric([key.namespace, key.name, part], value)
    return found


def _stragglers(jobs: Mapping[Key, int]) -> Metric:
    text = "Ranks of a TrainingJob that the others wait for; only of jobs that have some"
    found = GaugeMetricFamily("stoker_operator_trainingjob_stragglers", text, labels=["namespace", "name"])
    for key, count in sorted(jobs.items()):
        found.add_metric([key.namespace, key.name], count)
    return found


def _pool_figures(pools: Sequence[PoolReview]) -> Iterator[Metric]:
    """What the autoscaler saw and decided, for each pool that Stoker scales."""
    texts = {
        "replicas": "Replicas of a pool after the autoscaler's newest review",
        "needed_replicas": "Replicas that the goals of a pool need, also beyond its limits",
        "requests_per_second": "Requests of a pool in the last half minute",
        "forecast_requests_per_second": "Requests of a pool to expect until a new replica is ready",
        "startup_seconds": "P90 from the creation of a replica until it is ready",
        "held_requests": "Requests that routers hold for a pool",
        "borrowed_replicas": "Replicas of another pool that have changed their role to serve this one",
        "scaling_blocked": "1 while a pool is not scaled as its goals need, by reason",
    }
    names = ["namespace", "deployment", "pool"]
    families = {
        name: GaugeMetricFamily(
            f"stoker_operator_pool_{name}", text, labels=[*names, "reason"] if name == "scaling_blocked" else names
        )
        for name, text in texts.items()
    }
    for key, pool, seen, scaling in pools:
        labels = [key.namespace, key.name, pool]
        newest = scaling.newest
        values: dict[str, float] = {
            "replicas": newest.after,
            "needed_replicas": newest.needed if newest.needed is not None else newest.after,
            "requests_per_second": seen.rate,
            "forecast_requests_per_second": seen.demand.rate if seen.demand else 0.0,
            "startup_seconds": seen.startup_s,
            "held_requests": seen.held,
            "borrowed_replicas": seen.borrowed,
        }
        for name, value in values.items():
            families[name].add_metric(labels, value)
        if newest.reason in BLOCKING:
            families["scaling_blocked"].add_metric([*labels, newest.reason], 1)
    yield from families.values()
