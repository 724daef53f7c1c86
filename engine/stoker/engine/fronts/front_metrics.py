"""The metrics of several fronts: the sums of their own, and what their parent knows of each.

Registered by `program`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from stoker.engine.fronts.front_process import FrontProcess
from stoker.engine.fronts.pool import FrontPool


class FrontsCollector(Collector):
    """Reads the pool at each scrape."""

    def __init__(self, pool: FrontPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        for family in self._pool.report.families.values():
            yield family.to_metric()
        restarts = CounterMetricFamily("stoker:front_restarts", "Fronts that were started again after their end.")
        restarts.add_metric((), self._pool.restarts)
        yield restarts
        connections = GaugeMetricFamily("stoker:front_connections", "Open connections of a front.", labels=("front",))
        for front in self._pool.running:
            connections.add_metric((str(front.number),), front.connections)
        yield connections
        yield from _processes(self._pool.running)


def _processes(fronts: list[FrontProcess]) -> Iterator[Metric]:
    """Memory, time and files of each front's process: `stoker_front_process_resident_memory_bytes` and others."""
    families: dict[str, Metric] = {}
    for front in fronts:
        for family in ProcessCollector(namespace="stoker_front", pid=front.pid, registry=None).collect():
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            labels = {"front": str(front.number)}
            known.samples += [Sample(one.name, {**one.labels, **labels}, one.value) for one in family.samples]
    yield from families.values()
