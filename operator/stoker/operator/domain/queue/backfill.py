"""Back-fill that never delays the head of the queue: which room a later gang may take. Pure.

When a run ends is not known, so a back-filled gang may hold its room longer than any other. It starts only where the
head starts at the same moment without it: for every set of runs that may have ended by then, if the head has room, it
still has room beside the back-filled gang.

The head's room is a number of pods: the sum over its nodes of how many fit. The numbers that can come up while runs end
are the sums of what each run frees, a set that is kept as the bits of one integer. A back-filled gang lowers each of
them by at most its loss; it delays the head where a number lies from the head's size up to that size plus the loss.
Runs that share a node do not simply add up; they are enumerated together, or taken as an interval where they are many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse
from stoker.operator.domain.queue.applicant import Applicant, Holding

TOGETHER = 6
"""Runs with common nodes whose ends are enumerated; more are taken as an interval."""


def delays(
    head: Applicant, nodes: Sequence[NodeCapacity], holdings: Sequence[Holding], added: Iterable[PodUse]
) -> bool:
    """Whether pods in `added` may keep the head waiting beyond the moment when it has room without them.

    False is certain; True may be too careful: for a head with a required topology, whose room is more than a number,
    and for many runs on common nodes.

    Args:
        nodes: with what is free now, without `added`.
        holdings: the runs that may end, in any order.
    """
    usable = {node.name: node for node in nodes if node.obstacle(head.gang) is None}
    taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for use in added:
        if use.node in usable:
            taken[use.node].update(use.taken)
    loss = sum(_loss(head.gang, used) for used in taken.values())
    if not loss:
        return False
    if any(level.mode == "Required" for level in head.levels):
        return True
    window = ((1 << loss) - 1) << head.gang.size
    return bool(_reachable(head.gang, usable, holdings) & window)


def _loss(gang: Gang, used: Mapping[str, int]) -> int:
    """The most pods of the gang that fit less on a node where `used` is taken."""
    wanted = {**gang.requests, "pods": 1}
    return max(-(-used.get(resource, 0) // need) for resource, need in wanted.items() if need)


def _reachable(gang: Gang, usable: Mapping[str, NodeCapacity], holdings: Sequence[Holding]) -> int:
    """The numbers of pods that can have room while runs end, as bits."""
    held: list[dict[str, Counter[str]]] = []
    for holding in holdings:
        uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for use in holding.uses:
            if use.node in usable:
                uses[use.node].update(use.taken)
        if uses:
            held.append(dict(uses))
    busy = {name for uses in held for name in uses}
    reach = 1 << sum(node.slots(gang) for name, node in usable.items() if name not in busy)
    for group in _neighbours(held):
        reach = _sums(reach, _room_of(gang, usable, group))
    return reach


def _sums(reach: int, rooms: Iterable[int]) -> int:
    """Every number of `reach` plus every number of `rooms`."""
    found = 0
    for room in rooms:
        found |= reach << room
    return found


def _room_of(
    gang: Gang, usable: Mapping[str, NodeCapacity], group: Sequence[Mapping[str, Mapping[str, int]]]
) -> Iterable[int]:
    """Room on the nodes of runs that share them, for every set of these runs that may have ended."""
    names = sorted({name for uses in group for name in uses})
    if len(group) <= TOGETHER:
        return {_room(gang, usable, names, ended) for ended in _subsets(group)}
    return range(_room(gang, usable, names, ()), _room(gang, usable, names, group) + 1)


def _room(
    gang: Gang,
    usable: Mapping[str, NodeCapacity],
    names: Iterable[str],
    ended: Sequence[Mapping[str, Mapping[str, int]]],
) -> int:
    return sum(_with(usable[name], (uses[name] for uses in ended if name in uses)).slots(gang) for name in names)


def _with(node: NodeCapacity, freed: Iterable[Mapping[str, int]]) -> NodeCapacity:
    free = Counter(node.free)
    for uses in freed:
        free.update(uses)
    return replace(node, free=free)


def _subsets(
    group: Sequence[Mapping[str, Mapping[str, int]]],
) -> Iterator[tuple[Mapping[str, Mapping[str, int]], ...]]:
    for size in range(len(group) + 1):
        yield from combinations(group, size)


def _neighbours(held: Sequence[Mapping[str, Counter[str]]]) -> Iterator[list[Mapping[str, Counter[str]]]]:
    """Divide runs into groups without a common node."""
    groups: list[tuple[set[str], list[Mapping[str, Counter[str]]]]] = []
    group_of: dict[str, int] = {}
    for uses in held:
        near = sorted({group_of[name] for name in uses if name in group_of})
        names, members = set(uses), [uses]
        for index in near:
            names |= groups[index][0]
            members += groups[index][1]
            groups[index] = (set(), [])
        groups.append((names, members))
        group_of.update(dict.fromkeys(names, len(groups) - 1))
    yield from (members for _, members in groups if members)
