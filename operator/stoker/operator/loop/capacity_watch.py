"""The free capacity of the cluster, kept from every node and the requests of every pod, also those of others.

An informer of nodes and one of pods write into it. It keeps a small value for each: what a node can allocate with its
labels and taints, and what a pod takes from which node. A placement that was just decided counts at once (`assume`), so
that the next decision does not use the same room twice.

Owned by the loop.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stoker.operator.domain.placement.device_catalog import DeviceCatalog, needs_of
from stoker.operator.domain.placement.device_claim import PodClaims, claims_of_pod
from stoker.operator.domain.placement.free_nodes import FreeNodes
from stoker.operator.domain.placement.node_capacity import (
    NodeCapacity,
    PodUse,
    empty_node,
    less,
    pinned_node,
    pod_use,
)
from stoker.operator.domain.plan import Key, Object, Patch
from stoker.operator.loop.device_watch import DeviceWatch
from stoker.pod.resources.pod_requests import pod_requests

_PART = "capacity"
_CLAIMS = "claims"
"""Names of the reduced values inside of a listed object."""


class CapacityWatch:
    """What every node has left; the sink of the informers of nodes and pods.

    Args:
        grown: called when a node may have more room than before.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        self._grown = grown
        self.devices = DeviceWatch(self._devices_changed)
        self._claims: dict[str, PodClaims] = {}
        """Claims of pods on devices, by their uid; also of pods without a node."""
        self._taken: dict[str, tuple[tuple[object, ...], PodUse]] = {}
        """What pods with claims take, and of what it was computed."""
        self._equipped: tuple[object, int, Mapping[str, Mapping[str, int]]] = (None, 0, {})
        """Catalog, its version, and the devices that each node has, taken or not."""
        self._nodes: dict[str, NodeCapacity] = {}
        self._uses: dict[str, PodUse] = {}
        self._assumed: dict[str, PodUse] = {}
        self._promised: dict[tuple[str, str], tuple[Key, PodUse]] = {}
        """What pods that are being made take, by namespace and name, and the resource that makes them."""
        self._free = FreeNodes()
        """The same nodes and pods, without devices."""
        self._all: tuple[NodeCapacity, ...] | None = None
        """What `nodes()` returned last; None after a change."""

    def nodes(self, without: Collection[str] = ()) -> tuple[NodeCapacity, ...]:
        """Return all nodes by name, less what pods take, except the pods with the uids `without`."""
        if any(uid in self._uses or uid in self._assumed for uid in without):
            return self._remaining(frozenset(without))
        if self._all is None or self._counts_others():
            self._all = self._remaining(frozenset())
        return self._all

    def needs(self, namespace: str, spec: Mapping[str, Any]) -> Mapping[str, int]:
        """What a pod takes of the devices of its claims."""
        return needs_of(self.devices.catalog, namespace, spec).amounts

    def use_of(self, pod: Object) -> PodUse | None:
        """What a pod takes from which node, seen or assumed; None for one without a node and after its end."""
        uid = pod["metadata"]["uid"]
        found = self._held(uid)
        return self._with_devices(uid, found) if found is not None else None

    def assume(self, patches: Iterable[Patch]) -> None:
        """Count pods that are being pinned to nodes as if they were there already."""
        for patch in patches:
            node = pinned_node({"spec": patch.body.get("spec") or {}})
            if node is not None:
                self._all = None
                before = self._held(patch.ref.uid)
                self._assumed[patch.ref.uid] = PodUse(node, patch.requests)
                self._free.count(before, self._held(patch.ref.uid))

    def promise(self, key: Key, pods: Iterable[Object]) -> None:
        """Count pods that a pass over `key` makes on nodes, until they are stored or the next pass decides anew."""
        for pod in pods:
            node = pinned_node(pod) if pod["kind"] == "Pod" else None
            if node is not None:
                use = PodUse(node, pod_requests(pod["spec"]))
                self._promised[_name(pod)] = key, use
                self._free.count(None, use)
                self._all = None

    def release(self, key: Key) -> None:
        """Stop counting what was promised to `key` and not made."""
        for name in [name for name, (maker, _) in self._promised.items() if maker == key]:
            self._free.count(self._promised.pop(name)[1], None)
            self._changed(grown=True)

    def note_made(self, pod: Object) -> None:
        """Count a promised pod, which is stored now, by its uid."""
        _, use = self._promised.pop(_name(pod), (None, None))
        if use is None:
            return
        uid = pod["metadata"]["uid"]
        before = self._held(uid)
        self._assumed[uid] = use
        self._free.count(use, None)
        self._free.count(before, self._held(uid))
        self._all = None

    # The sink of the informers

    def pruned(self, resource: Object, _old: Object | None = None) -> Object:
        """The object reduced to its identity and what is counted of it."""
        metadata = {
            name: resource["metadata"][name]
            for name in ("name", "namespace", "uid", "resourceVersion")
            if name in resource["metadata"]
        }
        if resource["kind"] == "Node":
            return {"kind": "Node", "metadata": metadata, _PART: _node(resource)}
        claims = claims_of_pod(metadata.get("namespace", ""), resource["spec"])
        return {"kind": "Pod", "metadata": metadata, _PART: pod_use(resource), _CLAIMS: claims}

    def put(self, resource: Object) -> bool:
        """Count a node or a pod anew; True when that changed something."""
        found = resource if _PART in resource else self.pruned(resource)
        if found["kind"] == "Node":
            return self._put_node(found[_PART])
        uid, claims = found["metadata"]["uid"], found[_CLAIMS]
        if claims is not None and self._claims.get(uid) != claims:
            self._claims[uid] = claims
            self._taken.pop(uid, None)
            self._all = None
        return self._put_pod(uid, found[_PART])

    def remove(self, key: Key, uid: str, _version: int | None = None, *, last: Object | None = None) -> bool:  # noqa: ARG002
        """Forget a node or a pod that is gone."""
        if key.kind == "Node":
            self._all = None
            self._equipped = (None, 0, {})
            self._free.drop_node(key.name)
            return self._nodes.pop(key.name, None) is not None
        self._claims.pop(uid, None)
        return self._drop_pod(uid)

    def forget_unlisted(self, kind: str, items: Iterable[Object], _version: int, _namespace: str | None = None) -> None:
        """Forget what a list lacks. Nothing else writes here, so nothing can be newer than the list."""
        if kind == "Node":
            names = {item["metadata"]["name"] for item in items}
            self._all = None
            self._equipped = (None, 0, {})
            for name in self._nodes.keys() - names:
                self._free.drop_node(name)
                del self._nodes[name]
            return
        uids = {item["metadata"]["uid"] for item in items}
        self._claims = {uid: claims for uid, claims in self._claims.items() if uid in uids}
        for uid in {*self._uses, *self._assumed} - uids:
            self._drop_pod(uid)

    # Inside

    def _held(self, uid: str) -> PodUse | None:
        """What is counted for a pod: as it was seen, else as it was assumed."""
        return self._uses.get(uid) or self._assumed.get(uid)

    def _remaining(self, without: frozenset[str]) -> tuple[NodeCapacity, ...]:
        nodes = self._free.nodes(use for uid in without if (use := self._held(uid)) is not None)
        catalog = self._counting_catalog()
        if catalog is None:
            return nodes
        there, taken = self._all_devices(catalog), self._taken_devices(catalog, without)
        return tuple(
            replace(node, free={**node.free, **less(there[node.name], taken.get(node.name, {}))}) for node in nodes
        )

    def _counts_others(self) -> bool:
        """Whether other sets of devices are counted now than in the nodes that are kept."""
        catalog = self.devices.catalog
        return catalog is not None and catalog.version > 0 and self._equipped[:2] != (catalog, catalog.version)

    def _counting_catalog(self) -> DeviceCatalog | None:
        """The catalog where some set of devices is counted: nearly every cluster has one, few pods claim devices."""
        catalog = self.devices.catalog
        if catalog is None:
            return None
        for claims in {*self._claims.values()}:
            catalog.needs(claims)
        return catalog if catalog.version > 0 else None

    def _all_devices(self, catalog: DeviceCatalog) -> Mapping[str, Mapping[str, int]]:
        """The devices that each node has, taken or not, for each set of devices that is counted.

        An extended resource that a device plugin of the node offers is the plugin's, whatever class has its name.
        """
        if self._equipped[:2] != (catalog, catalog.version):
            found = {
                name: {key: count for key, count in catalog.amounts_of(name).items() if not node.free.get(key)}
                for name, node in self._nodes.items()
            }
            self._equipped = (catalog, catalog.version, found)
        return self._equipped[2]

    def _taken_devices(self, catalog: DeviceCatalog, without: frozenset[str]) -> Mapping[str, Mapping[str, int]]:
        """The devices that are taken on each node: by pods that claim some, and by all other claims.

        These are named claims, those of pods that end or have no node, and those that the scheduler made for requests
        of extended resources. A pod that has no such claim yet takes what it requests.
        """
        taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for uid in {*self._claims, *self._assumed} - without:
            if (use := self._held(uid)) is not None:
                taken[use.node].update(self._with_devices(uid, use).requests)
        for use in self._requesting(without) if catalog.extended else ():
            taken[use.node].update({name: use.requests[name] for name in catalog.extended & use.requests.keys()})
        told = {uid for uid in {*self._claims, *without} if self._held(uid) is not None}
        for claim in self.devices.claims_of_others(told):
            for node, devices in catalog.taken_by_claim(claim).items():
                taken[node].update(devices)
        return taken

    def _requesting(self, without: frozenset[str]) -> Iterator[PodUse]:
        """Yield the use of pods that have a node, and no claim that would name their devices."""
        yield from (use for _, use in self._promised.values())
        for uid in self._uses.keys() - self._claims.keys() - self._assumed.keys() - without:
            if not self.devices.allocated_to(uid):
                yield self._uses[uid]

    def _with_devices(self, uid: str, use: PodUse) -> PodUse:
        """What a pod takes, with the devices of its claims; computed once for the same pod, claims and catalog."""
        claims, catalog = self._claims.get(uid), self.devices.catalog
        if claims is None or catalog is None:
            return use
        allocated = self.devices.allocated_to(uid)
        basis = (catalog, catalog.version, allocated, use)
        known = self._taken.get(uid)
        if known is None or any(one is not other for one, other in zip(known[0], basis, strict=True)):
            taken = catalog.taken_by_pod(claims, allocated, use.node)
            known = self._taken[uid] = (basis, replace(use, requests={**use.requests, **taken}))
        return known[1]

    def _devices_changed(self) -> None:
        self._changed(grown=True)

    def _put_node(self, node: NodeCapacity) -> bool:
        if self._nodes.get(node.name) == node:
            return False
        self._nodes[node.name] = node
        self._free.put_node(node)
        self._equipped = (None, 0, {})
        self._changed(grown=True)
        return True

    def _put_pod(self, uid: str, use: PodUse | None) -> bool:
        """Replace what a pod takes. One that is seen without a node keeps what was assumed for it."""
        before = self._uses.get(uid)
        if before == use:
            return False
        if use is None:
            return self._drop_pod(uid)
        self._free.count(self._held(uid), use)
        self._assumed.pop(uid, None)
        self._uses[uid] = use
        self._changed(grown=before is not None)
        return True

    def _drop_pod(self, uid: str) -> bool:
        self._taken.pop(uid, None)
        self._free.count(self._held(uid), None)
        taken = [held.pop(uid, None) for held in (self._uses, self._assumed)]
        if not any(taken):
            return False
        self._changed(grown=True)
        return True

    def _changed(self, *, grown: bool) -> None:
        self._all = None
        if grown:
            self._grown()


def _name(pod: Object) -> tuple[str, str]:
    return pod["metadata"].get("namespace", ""), pod["metadata"]["name"]


def _node(node: Object) -> NodeCapacity:
    """The capacity of a node with all of its labels, since selectors may name any. Nodes carry the same ones by the
    dozen (`feature.node.kubernetes.io/...`), so their texts are shared."""
    metadata = node["metadata"]
    labels = {sys.intern(name): sys.intern(value) for name, value in (metadata.get("labels") or {}).items()}
    return empty_node({**node, "metadata": {**metadata, "labels": labels}})
