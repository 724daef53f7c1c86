"""What every node has left, kept up to date with each pod that comes or goes.

The slow twin is `node_capacity.remaining`, which counts all pods anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse, less


class FreeNodes:
    """Empty nodes less what pods take. A change costs O(1), the tuple of all nodes O(nodes)."""

    def __init__(self) -> None:
        self._empty: dict[str, NodeCapacity] = {}
        self._used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._pods: Counter[str] = Counter()
        """Pods that are counted, by node."""
        self._left: dict[str, NodeCapacity] = {}
        """What nodes have left; without those that changed since they were computed."""
        self._names: list[str] | None = None
        """Names of the nodes, sorted; None after a node came or went."""

    def put_node(self, node: NodeCapacity) -> None:
        """Add a node, or replace the one of that name."""
        if node.name not in self._empty:
            self._names = None
        self._empty[node.name] = node
        self._left.pop(node.name, None)

    def drop_node(self, name: str) -> None:
        """Forget a node; pods that take room on it stay counted, in case it comes back."""
        if self._empty.pop(name, None) is not None:
            self._names = None
        self._left.pop(name, None)

    def count(self, before: PodUse | None, now: PodUse | None) -> None:
        """Replace what a pod takes."""
        if before == now:
            return
        if before is not None:
            self._add(before, -1)
        if now is not None:
            self._add(now, 1)

    def nodes(self, without: Iterable[PodUse] = ()) -> tuple[NodeCapacity, ...]:
        """Return all nodes by name with what they have left, as if the pods `without` were not there."""
        if self._names is None:
            self._names = sorted(self._empty)
        given_back: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for use in without:
            given_back[use.node].update(use.taken)
        for name in self._names:
            if name not in self._left:
                self._left[name] = self._less(name, self._used.get(name))
        if not given_back:
            return tuple(map(self._left.__getitem__, self._names))
        return tuple(
            self._less(name, self._used[name] - given_back[name]) if name in given_back else self._left[name]
            for name in self._names
        )

    def _add(self, use: PodUse, sign: int) -> None:
        used = self._used[use.node]
        for resource, amount in use.taken.items():
            used[resource] += sign * amount
        self._pods[use.node] += sign
        if not self._pods[use.node]:
            del self._used[use.node], self._pods[use.node]
        self._left.pop(use.node, None)

    def _less(self, name: str, used: Counter[str] | None) -> NodeCapacity:
        node = self._empty[name]
        return replace(node, free=less(node.free, used)) if used else node
