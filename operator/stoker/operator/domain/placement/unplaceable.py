"""The reason why a gang cannot be placed, in one line that names what is missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.operator.domain.placement.gang import UNITS, Gang, Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.pod.resources.gpu import GPU, MIG_PREFIX

_REASONS = {
    **dict.fromkeys((GPU, MIG_PREFIX), "WaitingForGPUs"),
    **dict.fromkeys(("devices of ", "DeviceClass ", "ResourceClaimTemplate "), "WaitingForDevices"),
}
"""Reasons by the beginning of the scarce resource's name."""


@dataclass(frozen=True)
class Unplaceable:
    """A gang that has to wait."""

    reason: str
    """WaitingForGPUs, WaitingForDevices, WaitingForCapacity or TopologyUnsatisfied."""
    message: str

    @property
    def line(self) -> str:
        return f"{self.reason}: {self.message}"


def explain(
    gang: Gang,
    nodes: Sequence[NodeCapacity],
    levels: Sequence[Level],
    avoid: Collection[str],
    slots: Mapping[str, int],
) -> Unplaceable:
    """Return what is missing: capacity first, else the narrowest required level that cannot be kept.

    Args:
        slots: pods that fit, by usable node.
    """
    fit = sum(slots.values())
    if fit < gang.size:
        scarce = _scarce(gang, nodes, slots)
        lacks = (f", {scarce}" if scarce else "") + (", no two on one node" if gang.apart else "")
        aside = _set_aside(gang, nodes, avoid)
        reason = next((reason for start, reason in _REASONS.items() if scarce.startswith(start)), "WaitingForCapacity")
        return Unplaceable(reason, f"{fit} of {gang.size} pods fit on {len(slots)} nodes{lacks}{aside}")
    labels = {node.name: node.labels for node in nodes}
    return Unplaceable("TopologyUnsatisfied", _unkept(gang, levels, slots, labels))


def _scarce(gang: Gang, nodes: Sequence[NodeCapacity], slots: Mapping[str, int]) -> str:
    """The resource that the most nodes lack, with what is free and needed: `nvidia.com/gpu: 40 free, 64 needed`.

    Where enough is free, but in pieces that are too small, the need of one pod is named.
    """
    usable = [node for node in nodes if node.name in slots]
    wanted = {**gang.requests, "pods": 1}
    lacking = Counter(
        resource
        for node in usable
        for resource, need in wanted.items()
        if need and max(0, node.free.get(resource, 0)) // need == slots[node.name] < gang.size
    )
    if not lacking:
        return ""
    resource = max(lacking, key=lambda name: (lacking[name], name == GPU, name))
    free, need = sum(max(0, node.free.get(resource, 0)) for node in usable), wanted[resource]
    line = f"{resource}: {_shown(resource, free)} free, {_shown(resource, need * gang.size)} needed"
    return line if free < need * gang.size else f"{line}, {_shown(resource, need)} of them on one node for each pod"


def _set_aside(gang: Gang, nodes: Sequence[NodeCapacity], avoid: Collection[str]) -> str:
    """Nodes that are not used, by reason: `; not used: 2 tainted gpu, 1 avoided`."""
    obstacles = Counter("avoided" if node.name in avoid else node.obstacle(gang) for node in nodes)
    parts = [f"{count} {reason}" for reason, count in sorted(obstacles.items(), key=str) if reason is not None]
    return f"; not used: {', '.join(parts)}" if parts else ""


def _unkept(
    gang: Gang, levels: Sequence[Level], slots: Mapping[str, int], labels: Mapping[str, Mapping[str, str]]
) -> str:
    """The narrowest required level at which the largest domain is too small, else the levels together."""
    for level, unit, size in _required(gang, levels):
        domains: defaultdict[str, int] = defaultdict(int)
        for name, free in slots.items():
            if level.key in labels[name]:
                domains[labels[name][level.key]] += free
        if not domains:
            return f"no usable node has the label {level.key}"
        largest = max(domains, key=lambda name: (domains[name], name))
        if domains[largest] < size:
            return (
                f"no {level.key} has room for the {size} pods of {_a(unit)}; the largest, {largest}, has room for "
                f"{domains[largest]}"
            )
    kept = " and ".join(
        f"{'the' if unit == UNITS[-1] else 'each'} {unit} in one {level.key}"
        for level, unit, _ in _required(gang, levels)
    )
    return f"not all {gang.size} pods fit with {kept}"


def _required(gang: Gang, levels: Sequence[Level]) -> Iterator[tuple[Level, str, int]]:
    sizes = (gang.parts, gang.parts * gang.stages, gang.size)
    for level, unit, size in zip(levels, (gang.unit, *UNITS[1:]), sizes, strict=False):
        if level.mode == "Required":
            yield level, unit, size


def _a(unit: str) -> str:
    return f"an {unit}" if unit[0] in "aeio" else f"a {unit}"


def _shown(resource: str, amount: int) -> str:
    """An amount as people write it: cores, GiB, pieces."""
    if resource == "cpu":
        return f"{amount / 1000:g}"
    if resource in ("memory", "ephemeral-storage"):
        return f"{amount / 2**30:.1f}Gi"
    return str(amount)
