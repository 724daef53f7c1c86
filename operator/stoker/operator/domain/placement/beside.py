"""How many gangs of two kinds have room at once: what the one takes, the other cannot have. Pure.

Called by the autoscaler's loop for a prefill and a decode pool on the same nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse, remaining
from stoker.operator.domain.placement.place import Placement, count_placeable, place

MOST = 64
"""More gangs of the first kind are not tried."""


@dataclass(frozen=True)
class Kind:
    """Gangs that are alike."""

    gang: Gang
    levels: Sequence[Level] = ()


def count_beside(first: Kind, second: Kind, nodes: Sequence[NodeCapacity]) -> tuple[int, ...]:
    """The number of gangs of the second kind that have room beside 0, 1, 2 ... gangs of the first."""
    if first == second:
        room = count_placeable(first.gang, nodes, first.levels)
        return tuple(range(room, -1, -1))
    counts = [count_placeable(second.gang, nodes, second.levels)]
    while len(counts) <= MOST and isinstance(placed := place(first.gang, nodes, first.levels), Placement):
        nodes = remaining(nodes, [PodUse(name, first.gang.requests) for name in placed.nodes])
        counts.append(count_placeable(second.gang, nodes, second.levels))
    return tuple(counts)
