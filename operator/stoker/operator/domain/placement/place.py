"""The choice of a node for each pod of a gang, or one line that names what is missing.

Each level of the topology keeps a unit of the gang inside one domain: the first a tensor group, the second a model
replica with its pipeline, the third the whole gang. All pods of a gang are alike, so a domain's room is a number, the
room of nested domains adds up exactly, and a gang that can be placed is placed.

Among several choices the fewest domains are used, then the fullest: what stays free stays whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import HOSTNAME, NodeCapacity
from stoker.operator.domain.placement.unplaceable import Unplaceable, explain


@dataclass(frozen=True)
class Placement:
    """A node for each pod of a gang."""

    nodes: tuple[str, ...]
    """By the pod's number."""
    relaxed: tuple[str, ...] = ()
    """Keys of preferred levels that some unit could not keep."""


@dataclass(frozen=True)
class _Step:
    """One step of the division of a gang: a unit is `count` units of the next step, inside one domain of `key`."""

    count: int
    key: str | None = None
    required: bool = False


_Slots = dict[str, int]
"""Pods that still fit, by node."""


def place(
    gang: Gang, nodes: Sequence[NodeCapacity], levels: Sequence[Level] = (), avoid: Collection[str] = ()
) -> Placement | Unplaceable:
    """Choose a node for each pod; all or nothing. Costs O(nodes + pods) per level.

    Args:
        levels: for the tensor group, the model replica and the gang; narrowest first, fewer leave the rest free.
        avoid: names of nodes that are not used.

    A preferred level holds for as many units as there is room for inside of its domains.
    """
    usable = UsableNodes(gang, nodes, levels, avoid)
    found = usable.place()
    return explain(gang, nodes, levels, avoid, usable.slots) if found is None else found


class UsableNodes:
    """The nodes that gangs of one kind may use, with the pods that fit on each, while others take room on them.

    A queue of equal gangs reads every node once, not once for each gang.
    """

    def __init__(
        self, gang: Gang, nodes: Sequence[NodeCapacity], levels: Sequence[Level] = (), avoid: Collection[str] = ()
    ) -> None:
        usable = [node for node in nodes if node.name not in avoid and node.obstacle(gang) is None]
        self.slots: _Slots = {node.name: node.slots(gang) for node in usable}
        self._labels = {node.name: node.labels for node in usable}
        self._packing = _Packing(self._labels)
        self._gang, self._levels = gang, levels

    def update(self, node: NodeCapacity) -> None:
        """Read a node again, whose room has changed and nothing else."""
        if node.name in self.slots:
            self.slots[node.name] = node.slots(self._gang)

    def place(self) -> Placement | None:
        """Choose a node for each pod of one gang, without taking its room; None where there is not enough."""
        gang, steps, packing = self._gang, _steps(self._gang, self._levels), self._packing
        if packing.room(self.slots, steps) < 1:
            return None
        chosen = packing.fill(dict(self.slots), steps, 1)
        by_pod = dict(zip(gang.pods_by_replica(), chosen, strict=True))
        names = tuple(by_pod[pod] for pod in range(gang.size))
        return Placement(names, tuple(level.key for level in levels_not_kept(gang, names, self._levels, self._labels)))


def count_placeable(gang: Gang, nodes: Sequence[NodeCapacity], levels: Sequence[Level] = ()) -> int:
    """How many gangs of this kind have room at once, with every required level kept."""
    usable = {node.name: node for node in nodes if node.obstacle(gang) is None}
    slots = {name: node.slots(gang) for name, node in usable.items()}
    return _Packing({name: usable[name].labels for name in usable}).room(slots, _steps(gang, levels))


def _steps(gang: Gang, levels: Sequence[Level]) -> tuple[_Step, ...]:
    """The division of the gang, outermost first; the last step is a tensor group that prefers one node."""
    counts = (1, gang.stages, gang.replicas)
    steps = [_Step(gang.parts, HOSTNAME)]
    for index, count in enumerate(counts):
        level = levels[index] if index < len(levels) else None
        steps.append(_Step(count, level.key if level else None, level is not None and level.mode == "Required"))
    return tuple(reversed(steps))


class _Packing:
    """Packs units into domains; holds the labels of the nodes."""

    def __init__(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        self._labels = labels
        self._by_name = all(own.get(HOSTNAME) == name for name, own in labels.items())
        """Whether the label of each node's own name is its name, as it nearly always is."""

    def room(self, slots: _Slots, steps: Sequence[_Step]) -> int:
        """How many units of the first step fit, with every required level kept."""
        if not steps:
            return sum(slots.values())
        step = steps[0]
        domains = self._domains(slots, step.key).values() if step.required and step.key else (slots,)
        return sum(self.room(domain, steps[1:]) // step.count for domain in domains)

    def fill(self, slots: _Slots, steps: Sequence[_Step], units: int) -> list[str]:
        """Return the nodes of the pods of `units` units, in order, and take their slots. There is room for them."""
        if not steps:
            return _take(slots, _shares(slots, slots, units))
        step, inner = steps[0], steps[1:]
        if step.key is None:  # one domain with all nodes
            return self.fill(slots, inner, units * step.count)
        if step.key == HOSTNAME and not inner and self._by_name:
            return self._fill_nodes(slots, step.count, units)
        domains = self._domains(slots, step.key)
        rooms = {name: self.room(domain, inner) // step.count for name, domain in domains.items()}
        sizes = {name: sum(domain.values()) for name, domain in domains.items()}
        shares = _shares(rooms, sizes, units)
        chosen: list[str] = []
        for name, share in shares.items():
            chosen += self.fill(domains[name], inner, share * step.count)
            slots.update(domains[name])
        rest = units - sum(shares.values())
        return chosen + (self.fill(slots, inner, rest * step.count) if rest else [])

    def _fill_nodes(self, slots: _Slots, count: int, units: int) -> list[str]:
        """`fill` of the last step where each domain is one node, without a domain for each."""
        shares = _shares({name: free // count for name, free in slots.items()}, slots, units)
        chosen = _take(slots, {name: share * count for name, share in shares.items()})
        rest = units - sum(shares.values())
        return chosen + (self.fill(slots, (), rest * count) if rest else [])

    def _domains(self, slots: _Slots, key: str) -> dict[str, _Slots]:
        """The nodes by their value of a label; nodes without it are in no domain."""
        domains: defaultdict[str, _Slots] = defaultdict(dict)
        for name, free in slots.items():
            value = self._labels[name].get(key)
            if value is not None:
                domains[value][name] = free
        return dict(domains)


def _shares(rooms: Mapping[str, int], sizes: Mapping[str, int], units: int) -> dict[str, int]:
    """Divide units over domains with room: the smallest one that holds the rest, else the largest next."""
    fitting = [name for name, room in rooms.items() if room >= units] if units else []
    if fitting:
        return {min(fitting, key=lambda name: (rooms[name], sizes[name], name)): units}
    open_ = sorted((name for name in rooms if rooms[name]), key=lambda name: (rooms[name], sizes[name], name))
    ascending = [rooms[name] for name in open_]
    shares: dict[str, int] = {}
    while units and open_:
        index = min(bisect_left(ascending, units), len(open_) - 1)
        shares[open_[index]] = min(units, ascending[index])
        units -= ascending.pop(index)
        open_.pop(index)
        units = max(0, units)
    return shares


def _take(slots: _Slots, shares: Mapping[str, int]) -> list[str]:
    chosen: list[str] = []
    for name, share in shares.items():
        slots[name] -= share
        chosen += [name] * share
    return chosen


def levels_not_kept(
    gang: Gang, nodes: Sequence[str], levels: Sequence[Level], labels: Mapping[str, Mapping[str, str]]
) -> tuple[Level, ...]:
    """Return the levels with a unit in more than one domain, or outside of every domain.

    Args:
        nodes: of the gang's pods, by number.
        labels: of these nodes, by name; a node that is not in it is in no domain.
    """
    sizes = (gang.parts, gang.parts * gang.stages, gang.size)
    ordered = [nodes[pod] for pod in gang.pods_by_replica()]
    unkept = []
    for level, size in zip(levels, sizes, strict=False):
        units = (ordered[start : start + size] for start in range(0, len(ordered), size))
        domains = (Counter(labels.get(name, {}).get(level.key) for name in unit) for unit in units)
        if any(len(found) > 1 or None in found for found in domains):
            unkept.append(level)
    return tuple(unkept)
