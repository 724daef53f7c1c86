"""What one front has counted, and the sums over fronts: metrics of Prometheus and the counters of `/status`.

Every number of a front's own metrics is a count or a sum, so fronts add up. What a front had counted when it died stays
in the sums: a counter that falls would look like a restart of the engine.

Pure. Collected by `front_program`, added up by `pool`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from stoker.engine.core.load_counters import LoadCounters

CREATED = "_created"
"""Ends the name of a sample that holds a time; of several the earliest counts."""

SampleKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


@dataclass
class Family:
    """One metric with its samples."""

    name: str
    documentation: str
    kind: str
    samples: dict[SampleKey, float] = field(default_factory=dict)

    def add(self, other: Family) -> None:
        """Add another front's samples to these."""
        for key, value in other.samples.items():
            mine = self.samples.get(key)
            if mine is None:
                self.samples[key] = value
            elif key[0].endswith(CREATED):
                self.samples[key] = min(mine, value)
            else:
                self.samples[key] = mine + value

    def to_wire(self) -> list[Any]:
        """Plain values for the link."""
        samples = [[name, labels, value] for (name, labels), value in self.samples.items()]
        return [self.name, self.documentation, self.kind, samples]

    def to_metric(self) -> Metric:
        metric = Metric(self.name, self.documentation, self.kind)
        metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in self.samples.items()]
        return metric


@dataclass
class FrontReport:
    """Counts of one front, or of several."""

    families: dict[str, Family] = field(default_factory=dict)
    counters: LoadCounters = field(default_factory=LoadCounters)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for the link."""
        families = [one.to_wire() for one in self.families.values()]
        return {"families": families, "counters": self.counters.to_wire()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> FrontReport:
        """Read `to_wire`."""
        report = cls(counters=LoadCounters.from_wire(wire["counters"]))
        for name, documentation, kind, samples in wire["families"]:
            found = {(sample, tuple((key, text) for key, text in labels)): value for sample, labels, value in samples}
            report.families[name] = Family(name, documentation, kind, found)
        return report


def collected(registry: CollectorRegistry, counters: LoadCounters) -> FrontReport:
    """The present counts of a front's registry."""
    report = FrontReport(counters=counters)
    for metric in registry.collect():
        samples = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in metric.samples}
        report.families[metric.name] = Family(metric.name, metric.documentation, metric.type, samples)
    return report


def added(reports: Iterable[FrontReport]) -> FrontReport:
    """The sum of reports."""
    total = FrontReport()
    for report in reports:
        for name, family in report.families.items():
            total.families.setdefault(name, Family(name, family.documentation, family.kind)).add(family)
        total.counters.add(report.counters)
    return total
