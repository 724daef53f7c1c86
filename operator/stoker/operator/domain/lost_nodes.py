"""Which nodes that nobody hears of count as lost. Pure.

A cluster calls a node silent when its heartbeats stay away; whether the node is dead, or only the way to it is cut, nobody can tell. One silent
node is taken for dead after a while. Many at once rather mean a cut network, or an API server that was away: then none of them is lost before
the others are heard again. Silence counts on this operator's own clock, from when it was seen here, so nothing is judged by what went on while
nobody listened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

DEAF_S = 1.0
"""At least so long until the next look while no news can arrive."""


@dataclass(frozen=True)
class NodeLimits:
    """What an installation decides."""

    lost_s: float
    """Silence of one node after which it is lost."""
    outage_share: float
    """Silent nodes beyond this share of those that carry our pods are an outage; with 1 nothing is one."""
    outage_nodes: int
    """Fewer silent nodes than this are none."""


@dataclass(frozen=True)
class Carrier:
    """A node on which a pod of ours has not ended."""

    silent: bool
    zone: str = ""


@dataclass(frozen=True)
class Outage:
    """Many silent nodes at once."""

    silent: int
    nodes: int
    """Silent or not."""
    zone: str = ""
    """Empty: counted over all zones."""

    @property
    def text(self) -> str:
        where = f"nodes of zone {self.zone}" if self.zone else "nodes"
        return f"{self.silent} of {self.nodes} {where} with pods are silent at once"


@dataclass(frozen=True)
class NodeSilence:
    """What is remembered from one look to the next."""

    since_s: Mapping[str, float] = field(default_factory=dict)
    """Silent node -> monotonic time from which its silence counts."""
    outages: Mapping[str, Outage] = field(default_factory=dict)
    """Silent node -> the outage that it is part of."""
    heard: bool = True
    """Whether news of nodes could arrive."""


@dataclass(frozen=True)
class NodeLoss:
    """What holds now."""

    lost: frozenset[str] = frozenset()
    left_s: Mapping[str, float] = field(default_factory=dict)
    """Silent node -> seconds until it is lost."""
    outages: Mapping[str, Outage] = field(default_factory=dict)


def note_silence(
    before: NodeSilence, carriers: Mapping[str, Carrier], now_s: float, limits: NodeLimits, *, heard: bool
) -> NodeSilence:
    """What is known after this look. The count begins anew for every node when news can arrive again, and for the nodes of an outage at its end."""
    outages = dict(_outages(carriers, limits))
    kept = heard and before.heard
    counted = before.since_s.keys() - before.outages.keys() if kept else set()
    silent = (name for name, carrier in carriers.items() if carrier.silent)
    return NodeSilence({name: before.since_s[name] if name in counted else now_s for name in silent}, outages, heard)


def classify(known: NodeSilence, now_s: float, limits: NodeLimits) -> NodeLoss:
    """Silent nodes, sorted into lost ones, those that have time left, and those of an outage."""
    ends = {name: since + limits.lost_s - now_s for name, since in known.since_s.items() if name not in known.outages}
    if not known.heard:
        return NodeLoss(left_s={name: max(left, DEAF_S) for name, left in ends.items()}, outages=known.outages)
    lost = frozenset(name for name, left in ends.items() if left <= 0)
    return NodeLoss(lost, {name: left for name, left in ends.items() if name not in lost}, known.outages)


def _outages(carriers: Mapping[str, Carrier], limits: NodeLimits) -> Iterator[tuple[str, Outage]]:
    """By silent node: the outage of its zone, else of all nodes."""
    zones = sorted({carrier.zone for carrier in carriers.values()} - {""})
    found = {zone: outage for zone in ("", *zones) if (outage := _outage(carriers, zone, limits)) is not None}
    for name, carrier in carriers.items():
        outage = found.get(carrier.zone) or found.get("")
        if carrier.silent and outage is not None:
            yield name, outage


def _outage(carriers: Mapping[str, Carrier], zone: str, limits: NodeLimits) -> Outage | None:
    """Of one zone, or with an empty name of all of them."""
    among = [carrier for carrier in carriers.values() if zone in ("", carrier.zone)]
    silent = sum(carrier.silent for carrier in among)
    if silent < limits.outage_nodes or silent <= limits.outage_share * len(among):
        return None
    return Outage(silent, len(among), zone)
