"""What the queue starts now: the gangs in order while they fit, then those that delay the first one that does not.

Pure. Called by the loop when the queue, the nodes or the runs have changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse
from stoker.operator.domain.placement.place import Placement, UsableNodes
from stoker.operator.domain.queue.applicant import Applicant, Holding, Turn
from stoker.operator.domain.queue.backfill import delays
from stoker.operator.domain.queue.order import order, total_of

LOOK_AHEAD = 100
"""Gangs in order that are tried; those behind them wait for their turn without a trial."""


def decide(
    applicants: Iterable[Applicant], nodes: Sequence[NodeCapacity], holdings: Sequence[Holding]
) -> dict[str, Turn]:
    """Return the turn of each applicant by its name, in the queue's order.

    The head is the first gang that does not fit now and would fit if every run had ended; a gang that would not even
    then holds no other back. Behind the head a gang starts only where it delays the head in no case.

    Args:
        nodes: what is free.
        holdings: what the operator's own runs take of the same nodes.
    """
    ordered = order(applicants, holdings, total_of(nodes, holdings))
    room = _Room(nodes, holdings)
    turns: dict[str, Turn] = {}
    for index, found in enumerate(ordered):
        turn = Turn(position=index + 1, total=len(ordered))
        turns[found.name] = room.tried(found, turn) if index < LOOK_AHEAD else turn
    return turns


class _Room:
    """The nodes of one decision; gangs that it starts take their room at once."""

    def __init__(self, nodes: Sequence[NodeCapacity], holdings: Sequence[Holding]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._runs = list(holdings)
        self._head: Applicant | None = None
        self._misfits: set[str] = set()
        """Shapes that found no room. Room only shrinks, so they find none later."""
        self._usable: dict[tuple[str, bool], tuple[UsableNodes, int]] = {}
        """By shape, and whether avoided nodes are left out; with the length of `_taken` that it has seen."""
        self._taken: list[str] = []
        """Names of nodes on which gangs took room, in order."""
        self._held: set[str] = set()
        """Shapes that were held back for the head; the next of them is held too, without a trial."""

    def tried(self, found: Applicant, turn: Turn) -> Turn:
        """The turn with nodes where the gang may start, else with the head that room is kept for."""
        if found.shape in self._misfits:
            return turn
        if self._head is not None and found.shape in self._held:
            return replace(turn, kept_for=self._head.name)
        placed = self._placed(found)
        if placed is None:
            self._misfits.add(found.shape)
            if self._head is None and self._fits_at_last(found):
                self._head = found
                return replace(turn, is_head=True)
            return turn
        if self._head is not None:
            placed = self._beside_head(self._head, found, placed)
            if placed is None:
                self._held.add(found.shape)
                return replace(turn, kept_for=self._head.name)
        self._take(found, placed)
        return replace(turn, nodes=placed.nodes)

    def _beside_head(self, head: Applicant, found: Applicant, anywhere: Placement) -> Placement | None:
        """A placement that delays the head in no case: on nodes that are not for it, else anywhere."""
        others = [node for node in self._nodes.values() if node.obstacle(head.gang) is not None]
        aside = _placed(found, others) if others else None
        for placed in (aside, anywhere):
            if placed is not None and not delays(head, tuple(self._nodes.values()), self._runs, _uses(found, placed)):
                return placed
        return None

    def _placed(self, found: Applicant) -> Placement | None:
        """A placement on all nodes, each of which is read once for all gangs of a shape."""
        rounds = (self._up_to_date(found, careful=careful).place() for careful in _rounds(found))
        return next((placed for placed in rounds if placed is not None), None)

    def _up_to_date(self, found: Applicant, *, careful: bool) -> UsableNodes:
        known = self._usable.get((found.shape, careful))
        usable, seen = known or (_usable(found, tuple(self._nodes.values()), careful=careful), len(self._taken))
        for name in {*self._taken[seen:]}:
            usable.update(self._nodes[name])
        self._usable[found.shape, careful] = usable, len(self._taken)
        return usable

    def _fits_at_last(self, found: Applicant) -> bool:
        """Whether the gang fits once every run has ended."""
        held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for run in self._runs:
            for use in run.uses:
                held[use.node].update(use.taken)
        emptied = (replace(node, free=Counter(node.free) + held[node.name]) for node in self._nodes.values())
        return _placed(found, tuple(emptied)) is not None

    def _take(self, found: Applicant, placed: Placement) -> None:
        uses = _uses(found, placed)
        for use in uses:
            node = self._nodes[use.node]
            free = Counter(node.free)
            free.subtract(use.taken)
            self._nodes[use.node] = replace(node, free=free)
            self._taken.append(use.node)
        self._runs.append(Holding(namespace=found.namespace, uses=uses))


def _placed(found: Applicant, nodes: Sequence[NodeCapacity]) -> Placement | None:
    """A placement on these nodes; on those that it avoids only where no others have room."""
    rounds = (_usable(found, nodes, careful=careful).place() for careful in _rounds(found))
    return next((placed for placed in rounds if placed is not None), None)


def _rounds(found: Applicant) -> tuple[bool, ...]:
    return (True, False) if found.avoid else (False,)


def _usable(found: Applicant, nodes: Sequence[NodeCapacity], *, careful: bool) -> UsableNodes:
    return UsableNodes(found.gang, nodes, found.levels, found.avoid if careful else ())


def _uses(found: Applicant, placed: Placement) -> tuple[PodUse, ...]:
    return tuple(PodUse(node, found.gang.requests) for node in placed.nodes)
