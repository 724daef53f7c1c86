"""Scheduling on this machine: the gates, claims and GPUs that a pod waits for.

Called by `pod_life` until the pod can start; it changes only the node's GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from stoker.operator.cluster.local.gpus import Gpus, wanted_gpus
from stoker.operator.domain.plan import Key, Object
from stoker.pod.resources.gpu import GPU
from stoker.pod.resources.pod_requests import pod_requests
from stoker.pod.resources.quantity import amounts


class Obstacle(NamedTuple):
    """Reason and message of the condition PodScheduled."""

    reason: str
    message: str


def schedule(
    pod: Object,
    sources: Iterable[Key],
    find: Callable[[Key], Object | None],
    gpus: Gpus,
    capacity: Mapping[str, str],
) -> Obstacle | None:
    """Give the pod its GPUs and return None, or return the first thing that it still waits for.

    Args:
        sources: ConfigMaps, Secrets and claims that the pod needs; only claims hold up the scheduling.
        capacity: cores and memory of the machine. Pods share them freely, but none may ask for more than there is.
    """
    if pod["spec"].get("schedulingGates"):
        return Obstacle("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
    for key in sorted(sources):
        if key.kind == "PersistentVolumeClaim" and find(key) is None:
            return Obstacle("Unschedulable", f'persistentvolumeclaim "{key.name}" not found')
    if (lacking := _never_here(pod["spec"], capacity)) is not None:
        return Obstacle("Unschedulable", f"0/1 nodes are available: 1 {lacking}")
    wanted = wanted_gpus(pod)
    if gpus.take(pod["metadata"]["uid"], wanted) is None:
        have = f"{len(gpus.free)} of {len(gpus.devices)} are free, {wanted} are needed"
        return Obstacle("Unschedulable", f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu ({have})")
    return None


def _never_here(spec: Mapping[str, Any], capacity: Mapping[str, str]) -> str | None:
    """What a pod asks for that this machine never has: devices of claims, extended resources other than GPUs, more
    cores or memory than all."""
    if spec.get("resourceClaims"):
        return "cannot allocate all claims (the embedded cluster has no dynamic resource allocation; use gpusPerPod)"
    wanted = pod_requests(spec)
    others = sorted(name for name, need in wanted.items() if "/" in name and name != GPU and need)
    if others:
        return f"Insufficient {others[0]} (the embedded cluster offers {GPU})"
    for name, have in amounts(capacity).items():
        if (need := wanted.get(name, 0)) > have:
            return f"Insufficient {name} (this machine has {_shown(name, have)}, {_shown(name, need)} are needed)"
    return None


def _shown(resource: str, amount: int) -> str:
    """An amount as people write it: cores, or Gi."""
    return f"{amount / 1000:.15g}" if resource == "cpu" else f"{amount / 2**30:.1f}Gi"
