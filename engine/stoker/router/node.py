"""Where a pod runs, as far as routing needs it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """The node and the zone of a pod; empty where they are not known."""

    name: str = ""
    zone: str = ""


NOWHERE = Node()


def distance(one: Node, other: Node) -> int:
    """0 on one node, 1 in one zone, 2 otherwise, also where it is not known."""
    if one.name and one.name == other.name:
        return 0
    return 1 if one.zone and one.zone == other.zone else 2
