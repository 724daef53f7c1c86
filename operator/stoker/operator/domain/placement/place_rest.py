"""Nodes for the rest of a gang some of whose pods have theirs already. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse, remaining
from stoker.operator.domain.placement.place import Placement, levels_not_kept, place


def place_rest(
    gang: Gang,
    nodes: Sequence[NodeCapacity],
    held: Mapping[int, str],
    levels: Sequence[Level] = (),
    avoid: Collection[str] = (),
) -> Placement | None:
    """Choose a node for each pod of a gang around those that have one; None where that is not found.

    It looks for the choice that would have been made for the whole gang, then for any that keeps the required levels.

    Args:
        nodes: what they have left, with the room of the gang's own pods.
        held: nodes of the pods that have one, by number.
    """
    whole = place(gang, nodes, levels, avoid)
    if isinstance(whole, Placement) and all(whole.nodes[number] == node for number, node in held.items()):
        return whole
    left = remaining(nodes, [PodUse(node, gang.requests) for node in held.values()])
    if not _have_room(gang, left, held):
        return None
    chosen = _beside(gang, left, held, avoid)
    if chosen is None:
        return None
    unkept = levels_not_kept(gang, chosen, levels, {node.name: node.labels for node in nodes})
    if any(level.mode == "Required" for level in unkept):
        return None
    return Placement(chosen, tuple(level.key for level in unkept))


def _have_room(gang: Gang, left: Sequence[NodeCapacity], held: Mapping[int, str]) -> bool:
    """Whether the pods that have nodes fit there, so that others have not taken their room."""
    wanted = [resource for resource, need in {**gang.requests, "pods": 1}.items() if need]
    fits = {node.name: all(node.free.get(resource, -1) >= 0 for resource in wanted) for node in left}
    return all(fits.get(node, False) for node in held.values())


def _beside(
    gang: Gang, left: Sequence[NodeCapacity], held: Mapping[int, str], avoid: Collection[str]
) -> tuple[str, ...] | None:
    """The nodes by number, those of the missing pods wherever there is room."""
    missing = [number for number in range(gang.size) if number not in held]
    used = {*avoid, *(held.values() if gang.apart else ())}
    rest = place(replace(gang, parts=1, stages=1, replicas=len(missing)), left, (), used)
    if not isinstance(rest, Placement):
        return None
    chosen = {**held, **dict(zip(missing, rest.nodes, strict=True))}
    return tuple(chosen[number] for number in range(gang.size))
