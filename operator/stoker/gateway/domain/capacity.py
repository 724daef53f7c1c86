"""GPUs of nodes: how many there are and how many are free. Pure.

A GPU is what a pod gets as one: a unit of `nvidia.com/gpu` or of a MIG resource (`nvidia.com/mig-*`) of a device
plugin, or a device of a driver `gpu.*` in ResourceSlices (dynamic resource allocation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.gateway.domain.claimed_gpus import ClaimedGpus, DeviceCount
from stoker.pod.resources.gpu import is_gpu_resource
from stoker.pod.resources.pod_requests import pod_requests
from stoker.pod.resources.quantity import amounts

ENDED = ("Succeeded", "Failed")
NO_CLAIMS = ClaimedGpus()

Object = Mapping[str, Any]


@dataclass(frozen=True)
class GpuResource:
    """GPUs of one node under one name: `nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`, the driver `gpu.nvidia.com`."""

    name: str
    total: int
    available: int


@dataclass(frozen=True)
class NodeCapacity:
    """One node."""

    name: str
    status: str
    """`Ready`, `NotReady` or `Cordoned`."""
    gpu_resources: tuple[GpuResource, ...]
    cpu: str | None
    memory: str | None

    @property
    def gpus(self) -> int:
        """GPUs of all names."""
        return sum(one.total for one in self.gpu_resources)

    @property
    def available_gpus(self) -> int:
        """GPUs of all names that no pod holds."""
        return sum(one.available for one in self.gpu_resources)


def capacities(nodes: Sequence[Object], pods: Sequence[Object], claimed: ClaimedGpus = NO_CLAIMS) -> list[NodeCapacity]:
    """Capacity of each node. A node that takes no pods has no available GPUs."""
    taken: dict[str, dict[str, int]] = {}
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if node and (pod.get("status") or {}).get("phase") not in ENDED:
            on_node = taken.setdefault(node, {})
            for name, count in _asked(pod).items():
                on_node[name] = on_node.get(name, 0) + count
    by_node = claimed.counts()
    return [
        _capacity(node, taken.get(node["metadata"]["name"], {}), by_node.get(node["metadata"]["name"], {}))
        for node in nodes
    ]


def gpus_of_pod(pod: Object, claimed: ClaimedGpus = NO_CLAIMS) -> int:
    """GPUs of a pod: those that its containers ask for, and those that its claims hold."""
    return sum(_asked(pod).values()) + claimed.held_by(pod)


def _asked(pod: Object) -> dict[str, int]:
    return {name: count for name, count in pod_requests(pod["spec"]).items() if is_gpu_resource(name) and count}


def _capacity(node: Object, taken: Mapping[str, int], claimed: Mapping[str, DeviceCount]) -> NodeCapacity:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    state = _state(node)
    totals = amounts({name: quantity for name, quantity in allocatable.items() if is_gpu_resource(name)})
    found = {name: GpuResource(name, total, max(0, total - taken.get(name, 0))) for name, total in totals.items()}
    found |= {driver: GpuResource(driver, count.total, count.free) for driver, count in claimed.items()}
    return NodeCapacity(
        name=node["metadata"]["name"],
        status=state,
        gpu_resources=tuple(
            one if state == "Ready" else GpuResource(one.name, one.total, 0)
            for _, one in sorted(found.items())
            if one.total
        ),
        cpu=allocatable.get("cpu"),
        memory=allocatable.get("memory"),
    )


def _state(node: Object) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    if not any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions):
        return "NotReady"
    return "Cordoned" if (node.get("spec") or {}).get("unschedulable") else "Ready"
