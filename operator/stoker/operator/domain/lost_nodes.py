"""Classification of silent nodes: which of them count as lost. Pure.

A cluster calls a node silent when its heartbeats stay away, be the node dead or only cut off. One silent node counts
as lost after a while. Many at once point to a cut network or to an API server that was away: that is an outage, and
none of its nodes is lost before it ends, or before a zone has been silent for so long that it must be dead. Silence
counts on this operator's own clock, from when it was first seen here, so time in which the operator was not watching
does not count.

Called by the loop's `node_watch` and `lost_pods`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

UNWATCHED_S = 1.0
"""Shortest time to the next look while no news of nodes can arrive."""


@dataclass(frozen=True)
class NodeLimits:
    """Limits that an installation sets."""

    lost_s: float
    """Silence of one node after which it is lost."""
    outage_share: float
    """Silent nodes beyond this share of the nodes that carry our pods are an outage; with 1 there is none."""
    outage_nodes: int
    """Fewer silent nodes than this are never an outage."""
    zone_outage_s: float = math.inf
    """Outage of one zone after which its silent nodes are lost all the same."""


@dataclass(frozen=True)
class Carrier:
    """A node with a pod of ours that has not ended."""

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
    """Memory from one look at the nodes to the next."""

    since_s: Mapping[str, float] = field(default_factory=dict)
    """Monotonic time from which the silence of a node counts, by node."""
    outages: Mapping[str, Outage] = field(default_factory=dict)
    """The outage that a silent node is part of, by node."""
    outage_since_s: Mapping[str, float] = field(default_factory=dict)
    """Monotonic time from which a node has been part of outages without a break, by node."""
    watched: bool = True
    """Whether news of nodes could arrive."""


@dataclass(frozen=True)
class NodeLoss:
    """Silent nodes at one moment: lost ones, those that have time left, and those of an outage."""

    lost: frozenset[str] = frozenset()
    left_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds until a silent node is lost, by node."""
    outages: Mapping[str, Outage] = field(default_factory=dict)
    """The outage that keeps a silent node from being lost, by node."""


def note_silence(
    before: NodeSilence, carriers: Mapping[str, Carrier], now_s: float, limits: NodeLimits, *, watched: bool
) -> NodeSilence:
    """The memory after a look at the nodes.

    The count begins anew for every node when news can arrive again, and for the nodes of an outage at its end.
    """
    outages = dict(_outages(carriers, limits))
    kept = watched and before.watched
    counted = before.since_s.keys() - before.outages.keys() if kept else set()
    silent = (name for name, carrier in carriers.items() if carrier.silent)
    since_s = {name: before.since_s[name] if name in counted else now_s for name in silent}
    held = before.outage_since_s if kept else {}
    return NodeSilence(since_s, outages, {name: held.get(name, now_s) for name in outages}, watched)


def classify(known: NodeSilence, now_s: float, limits: NodeLimits) -> NodeLoss:
    """Sort the silent nodes into lost ones, those that have time left, and those of an outage."""
    ends = {name: since + limits.lost_s - now_s for name, since in known.since_s.items() if name not in known.outages}
    ends |= _zones_left_s(known, now_s, limits)
    if not known.watched:
        return NodeLoss(left_s={name: max(left, UNWATCHED_S) for name, left in ends.items()}, outages=known.outages)
    lost = frozenset(name for name, left in ends.items() if left <= 0)
    left_s = {name: left for name, left in ends.items() if name not in lost}
    return NodeLoss(lost, left_s, {name: outage for name, outage in known.outages.items() if name not in lost})


def _zones_left_s(known: NodeSilence, now_s: float, limits: NodeLimits) -> dict[str, float]:
    """Seconds until the nodes of a silent zone count as lost; an outage of all nodes has no such end."""
    if math.isinf(limits.zone_outage_s):
        return {}
    in_zones = (name for name, outage in known.outages.items() if outage.zone)
    return {name: known.outage_since_s[name] + limits.zone_outage_s - now_s for name in in_zones}


def _outages(carriers: Mapping[str, Carrier], limits: NodeLimits) -> Iterator[tuple[str, Outage]]:
    """Yield each silent node with the outage of its zone, else of all nodes."""
    zones = sorted({carrier.zone for carrier in carriers.values()} - {""})
    found = {zone: outage for zone in ("", *zones) if (outage := _outage(carriers, zone, limits)) is not None}
    for name, carrier in carriers.items():
        outage = found.get(carrier.zone) or found.get("")
        if carrier.silent and outage is not None:
            yield name, outage


def _outage(carriers: Mapping[str, Carrier], zone: str, limits: NodeLimits) -> Outage | None:
    """The outage of one zone, or of all nodes when `zone` is empty."""
    among = [carrier for carrier in carriers.values() if zone in ("", carrier.zone)]
    silent = sum(carrier.silent for carrier in among)
    if silent < limits.outage_nodes or silent <= limits.outage_share * len(among):
        return None
    return Outage(silent, len(among), zone)
