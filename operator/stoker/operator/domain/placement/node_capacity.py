"""The free capacity of nodes, and which of them a gang may use. Pure functions on raw nodes and pods.

Made from the store's nodes and pods before each placement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.quantity import amounts

HOSTNAME = "kubernetes.io/hostname"
_REPELLING = frozenset({"NoSchedule", "NoExecute"})
_ENDED = frozenset({"Succeeded", "Failed"})


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
        wanted = {**gang.requests, "pods": 1}
        return max(0, min(self.free.get(resource, 0) // need for resource, need in wanted.items() if need))

    def obstacle(self, gang: Gang) -> str | None:
        """The reason why no pod of the gang may run here, whatever is free; None if there is none."""
        if not self.schedulable:
            return "not ready or cordoned"
        if any(self.labels.get(label) != value for label, value in gang.node_selector.items()):
            return "outside of nodeSelector"
        for taint in self.taints:
            if taint.get("effect") in _REPELLING and not any(_tolerates(found, taint) for found in gang.tolerations):
                return f"tainted {taint.get('key')}"
        return None


def node_capacities(nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> list[NodeCapacity]:
    """Return each node with what it can allocate less the requests of the pods that are bound to it, by name."""
    used: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pod in pods:
        name = pod["spec"].get("nodeName") or pinned_node(pod)
        if name and (pod.get("status") or {}).get("phase") not in _ENDED:
            for resource, need in {**pod_requests(pod["spec"]), "pods": 1}.items():
                used[name][resource] += need
    return [_capacity(node, used[node["metadata"]["name"]]) for node in sorted(nodes, key=_name)]


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return what the scheduler reserves for a pod: the sum of its containers, at least its largest init container.

    Init containers that restart (sidecars) count as containers. A limit stands for a request that is not given.
    """
    total: defaultdict[str, int] = defaultdict(int)
    largest: defaultdict[str, int] = defaultdict(int)
    for container in spec.get("initContainers") or ():
        for resource, need in _container_requests(container).items():
            if container.get("restartPolicy") == "Always":
                total[resource] += need
            largest[resource] = max(largest[resource], need)
    for container in spec.get("containers") or ():
        for resource, need in _container_requests(container).items():
            total[resource] += need
    overhead = amounts(spec.get("overhead") or {})
    return {
        resource: max(total[resource], largest[resource]) + overhead.get(resource, 0)
        for resource in {**total, **largest, **overhead}
    }


def pinned_node(pod: Mapping[str, Any]) -> str | None:
    """The one node that a required affinity names; None if there is none."""
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or ()
    for field_ in terms[0].get("matchFields") or () if len(terms) == 1 else ():
        if field_["key"] == "metadata.name" and field_["operator"] == "In" and len(field_["values"]) == 1:
            return str(field_["values"][0])
    return None


def _capacity(node: Mapping[str, Any], used: Mapping[str, int]) -> NodeCapacity:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    allocatable = amounts(status.get("allocatable") or {})
    ready = any(found["type"] == "Ready" and found["status"] == "True" for found in status.get("conditions") or ())
    name = str(node["metadata"]["name"])
    return NodeCapacity(
        name=name,
        free={resource: total - used.get(resource, 0) for resource, total in allocatable.items()},
        labels={HOSTNAME: name, **(node["metadata"].get("labels") or {})},
        taints=tuple(spec.get("taints") or ()),
        schedulable=ready and not spec.get("unschedulable") and not node["metadata"].get("deletionTimestamp"),
    )


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return key in (None, "", taint.get("key"))
    return bool(key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or ""))


def _name(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])
