"""The free capacity of nodes, and which of them a gang may use. Pure functions on raw nodes and pods.

Made from the store's nodes and pods before each placement.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_affinity import meets
from stoker.pod.resources.pod_requests import pod_requests
from stoker.pod.resources.quantity import amounts
from stoker.pod.resources.taint import repels

HOSTNAME = "kubernetes.io/hostname"
PIN = "stoker.dev/pin"
"""Field of a stored pod's spec with the node that its affinity names; the whole affinity takes a kilobyte."""
_ENDED = frozenset({"Succeeded", "Failed"})
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """What one node has left for new pods."""

    name: str
    free: Mapping[str, int]
    """In the units of `quantity.amount`; `pods` is the number of pods that may still start."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, Any], ...] = ()
    schedulable: bool = True
    """Ready, and not cordoned."""

    def slots(self, gang: Gang) -> int:
        """How many pods of the gang fit."""
        free = self.free
        found = max(0, min([free.get(resource, 0) // need for resource, need in gang.wanted]))
        return min(found, 1) if gang.apart else found

    def obstacle(self, gang: Gang) -> str | None:
        """The reason why no pod of the gang may run here, whatever is free; None if there is none."""
        if not self.schedulable:
            return "not ready or cordoned"
        if gang.node_selector and any(self.labels.get(key) != value for key, value in gang.node_selector.items()):
            return "outside of nodeSelector"
        if gang.affinity_terms and not meets(self.labels, self.name, gang.affinity_terms):
            return "outside of the node affinity"
        taint = repels(self.taints, gang.tolerations) if self.taints else None
        return f"tainted {taint.get('key')}" if taint is not None else None


@dataclass(frozen=True)
class PodUse:
    """What one pod takes from its node."""

    node: str
    requests: Mapping[str, int]
    pods: int = 1
    """0: devices that a claim holds without a pod of its own."""

    @property
    def taken(self) -> dict[str, int]:
        """What is free again when it ends."""
        return {**self.requests, "pods": self.pods}


def pod_use(pod: Mapping[str, Any]) -> PodUse | None:
    """Return the use of a pod that is bound to a node or pinned to one; None for others, and after its end."""
    node = pod["spec"].get("nodeName") or pinned_node(pod)
    if not node or (pod.get("status") or {}).get("phase") in _ENDED:
        return None
    return PodUse(str(node), pod_requests(pod["spec"]))


def empty_node(node: Mapping[str, Any]) -> NodeCapacity:
    """Return a node with all that it can allocate."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = any(found["type"] == "Ready" and found["status"] == "True" for found in status.get("conditions") or ())
    name = str(node["metadata"]["name"])
    return NodeCapacity(
        name=name,
        free=amounts(status.get("allocatable") or {}),
        labels={HOSTNAME: name, **(node["metadata"].get("labels") or {})},
        taints=tuple(spec.get("taints") or ()),
        schedulable=ready and not spec.get("unschedulable") and not node["metadata"].get("deletionTimestamp"),
    )


def remaining(nodes: Iterable[NodeCapacity], uses: Iterable[PodUse]) -> tuple[NodeCapacity, ...]:
    """Return empty nodes less what pods use, by name."""
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for use in uses:
        used[use.node].update(use.taken)
    by_name = sorted(nodes, key=lambda node: node.name)
    return tuple(
        replace(node, free=less(node.free, used[node.name])) if node.name in used else node for node in by_name
    )


def required_terms(affinity: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """The terms of a pod's required node affinity; none if it has no such affinity."""
    own = ((affinity or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return tuple(own.get("nodeSelectorTerms") or ())


def with_node_labels(keys: Iterable[str], affinity: Mapping[str, Any]) -> dict[str, Any]:
    """Return `affinity` with nodes required that have all these labels, beside its own terms.

    A term without conditions matches no node, and stays so.
    """
    own = dict(affinity.get("nodeAffinity") or {})
    present = [{"key": key, "operator": "Exists"} for key in keys]
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *present]} if term else {}
        for term in required_terms(affinity) or ({"matchExpressions": []},)
    ]
    return {**affinity, "nodeAffinity": {**own, _REQUIRED: {"nodeSelectorTerms": terms}}}


def affinity_to(node: str, affinity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `affinity` (of a pod that is still gated) with one node required beside its own terms."""
    own = dict((affinity or {}).get("nodeAffinity") or {})
    terms = required_terms(affinity) or ({},)
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    pinned = [{**term, "matchFields": [*(term.get("matchFields") or ()), pin]} for term in terms]
    return {**(affinity or {}), "nodeAffinity": {**own, _REQUIRED: {"nodeSelectorTerms": pinned}}}


def pinned_node(pod: Mapping[str, Any]) -> str | None:
    """The one node that every term of the required affinity names (`affinity_to`); None if there is none."""
    if (pin := pod["spec"].get(PIN)) is not None:
        return str(pin)
    named = {_named_node(term) for term in required_terms(pod["spec"].get("affinity"))}
    return named.pop() if len(named) == 1 else None


def less(free: Mapping[str, int], used: Mapping[str, int]) -> dict[str, int]:
    """Return what is free once `used` is taken."""
    return {resource: total - used.get(resource, 0) for resource, total in free.items()}


def _named_node(term: Mapping[str, Any]) -> str | None:
    for found in term.get("matchFields") or ():
        if found["key"] == "metadata.name" and found["operator"] == "In" and len(found["values"]) == 1:
            return str(found["values"][0])
    return None
