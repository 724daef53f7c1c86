"""The free capacity of the cluster, kept from every node and the requests of every pod, also those of others.

An informer of nodes and one of pods write into it. It keeps a small value for each: what a node can allocate with its
labels and taints, and what a pod takes from which node. A placement that was just decided counts at once (`assume`), so
that the next decision does not use the same room twice.

Owned by the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from stoker.operator.domain.placement.node_capacity import (
    NodeCapacity,
    PodUse,
    empty_node,
    pinned_node,
    pod_use,
    remaining,
)
from stoker.operator.domain.plan import Key, Object, Patch

_IRRELEVANT = ("feature.node.kubernetes.io/", "beta.kubernetes.io/")
"""Prefixes of labels that a node carries by the dozen and no topology uses."""
_PART = "capacity"
"""Name of the reduced value inside of a listed object."""


class CapacityWatch:
    """What every node has left; the sink of the informers of nodes and pods.

    Args:
        grown: called when a node may have more room than before.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        self._grown = grown
        self._nodes: dict[str, NodeCapacity] = {}
        self._uses: dict[str, PodUse] = {}
        self._assumed: dict[str, PodUse] = {}
        self._all: tuple[NodeCapacity, ...] | None = None
        """What `nodes()` returned last; None after a change."""

    def nodes(self, without: Collection[str] = ()) -> tuple[NodeCapacity, ...]:
        """Return all nodes by name, less what pods take, except the pods with the uids `without`."""
        if any(uid in self._uses or uid in self._assumed for uid in without):
            return remaining(self._nodes.values(), self._counted(frozenset(without)))
        if self._all is None:
            self._all = remaining(self._nodes.values(), self._counted(frozenset()))
        return self._all

    def use_of(self, pod: Object) -> PodUse | None:
        """What a pod takes from which node, seen or assumed; None for one without a node and after its end."""
        uid = pod["metadata"]["uid"]
        return self._uses.get(uid) or self._assumed.get(uid)

    def assume(self, patches: Iterable[Patch]) -> None:
        """Count pods that are being pinned to nodes as if they were there already."""
        for patch in patches:
            node = pinned_node({"spec": patch.body.get("spec") or {}})
            if node is not None:
                self._all = None
                self._assumed[patch.ref.uid] = PodUse(node, patch.requests)

    # The sink of the informers

    def pruned(self, resource: Object, _old: Object | None = None) -> Object:
        """The object reduced to its identity and what is counted of it."""
        metadata = {
            name: resource["metadata"][name]
            for name in ("name", "namespace", "uid", "resourceVersion")
            if name in resource["metadata"]
        }
        counted: Any = _node(resource) if resource["kind"] == "Node" else pod_use(resource)
        return {"kind": resource["kind"], "metadata": metadata, _PART: counted}

    def put(self, resource: Object) -> bool:
        """Count a node or a pod anew; True when that changed something."""
        value = resource[_PART] if _PART in resource else self.pruned(resource)[_PART]
        if resource["kind"] == "Node":
            return self._put_node(value)
        return self._put_pod(resource["metadata"]["uid"], value)

    def remove(self, key: Key, uid: str, _version: int | None = None, *, last: Object | None = None) -> bool:  # noqa: ARG002
        """Forget a node or a pod that is gone."""
        if key.kind == "Node":
            self._all = None
            return self._nodes.pop(key.name, None) is not None
        return self._drop_pod(uid)

    def forget_unlisted(self, kind: str, items: Iterable[Object], _version: int, _namespace: str | None = None) -> None:
        """Forget what a list lacks. Nothing else writes here, so nothing can be newer than the list."""
        if kind == "Node":
            names = {item["metadata"]["name"] for item in items}
            self._all = None
            self._nodes = {name: node for name, node in self._nodes.items() if name in names}
            return
        uids = {item["metadata"]["uid"] for item in items}
        for uid in {*self._uses, *self._assumed} - uids:
            self._drop_pod(uid)

    # Inside

    def _counted(self, without: frozenset[str]) -> Iterator[PodUse]:
        yield from (use for uid, use in self._uses.items() if uid not in without)
        yield from (use for uid, use in self._assumed.items() if uid not in without and uid not in self._uses)

    def _put_node(self, node: NodeCapacity) -> bool:
        if self._nodes.get(node.name) == node:
            return False
        self._nodes[node.name] = node
        self._changed(grown=True)
        return True

    def _put_pod(self, uid: str, use: PodUse | None) -> bool:
        """Replace what a pod takes. One that is seen without a node keeps what was assumed for it."""
        before = self._uses.get(uid)
        if before == use:
            return False
        if use is None:
            return self._drop_pod(uid)
        self._assumed.pop(uid, None)
        self._uses[uid] = use
        self._changed(grown=before is not None)
        return True

    def _drop_pod(self, uid: str) -> bool:
        taken = [held.pop(uid, None) for held in (self._uses, self._assumed)]
        if not any(taken):
            return False
        self._changed(grown=True)
        return True

    def _changed(self, *, grown: bool) -> None:
        self._all = None
        if grown:
            self._grown()


def _node(node: Object) -> NodeCapacity:
    metadata = node["metadata"]
    labels = {name: value for name, value in (metadata.get("labels") or {}).items() if not name.startswith(_IRRELEVANT)}
    return empty_node({**node, "metadata": {**metadata, "labels": labels}})
