"""GPUs of nodes: how many there are and how many are free. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESOURCE = "nvidia.com/gpu"
ENDED = ("Succeeded", "Failed")

Object = Mapping[str, Any]


@dataclass(frozen=True)
class NodeCapacity:
    """One node."""

    name: str
    status: str
    """`Ready`, `NotReady` or `Cordoned`."""
    gpus: int
    available_gpus: int
    cpu: str | None
    memory: str | None


def capacities(nodes: Sequence[Object], pods: Sequence[Object]) -> list[NodeCapacity]:
    """Capacity of each node. A node that takes no pods has no available GPUs."""
    taken: dict[str, int] = {}
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if node and (pod.get("status") or {}).get("phase") not in ENDED:
            taken[node] = taken.get(node, 0) + asked_gpus(pod)
    return [_capacity(node, taken.get(node["metadata"]["name"], 0)) for node in nodes]


def asked_gpus(pod: Object) -> int:
    """GPUs that a pod holds: the sum of its containers, or the most that those take that run before them.

    Init containers that restart (sidecars) run on beside all that come after them.
    """
    spec = pod["spec"]
    beside = most = 0
    for container in spec.get("initContainers") or ():
        most = max(most, beside + _asked(container))
        beside += _asked(container) if container.get("restartPolicy") == "Always" else 0
    return max(most, beside + sum(_asked(container) for container in spec.get("containers") or ()))


def _asked(container: Object) -> int:
    resources = container.get("resources") or {}
    found = (resources.get("limits") or {}).get(RESOURCE) or (resources.get("requests") or {}).get(RESOURCE) or 0
    return int(found)


def _capacity(node: Object, taken: int) -> NodeCapacity:
    status = node.get("status") or {}
    allocatable = status.get("allocatable") or {}
    gpus = int(allocatable.get(RESOURCE) or 0)
    state = _state(node)
    return NodeCapacity(
        name=node["metadata"]["name"],
        status=state,
        gpus=gpus,
        available_gpus=max(0, gpus - taken) if state == "Ready" else 0,
        cpu=allocatable.get("cpu"),
        memory=allocatable.get("memory"),
    )


def _state(node: Object) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    if not any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions):
        return "NotReady"
    return "Cordoned" if (node.get("spec") or {}).get("unschedulable") else "Ready"
