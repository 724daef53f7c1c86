"""What a pod takes from its node: the resources that the scheduler reserves for it. Pure, on raw specs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stoker.pod.resources.quantity import amounts

_POD_LEVEL = frozenset({"cpu", "memory"})
"""Resources that a pod may name for itself, beside huge pages."""


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return what the scheduler reserves for a pod: the sum of its containers, at least its largest init container.

    Init containers that restart (sidecars) count as containers, and beside the init containers after them. A limit
    stands for a request that is not given.
    CPU, memory and huge pages that the pod itself names count in place of the containers' (Kubernetes 1.34).
    """
    total: defaultdict[str, int] = defaultdict(int)
    largest: defaultdict[str, int] = defaultdict(int)
    for container in spec.get("initContainers") or ():
        for resource, need in _container_requests(container).items():
            largest[resource] = max(largest[resource], total[resource] + need)
            if container.get("restartPolicy") == "Always":
                total[resource] += need
    for container in spec.get("containers") or ():
        for resource, need in _container_requests(container).items():
            total[resource] += need
    own = {name: max(total[name], largest[name]) for name in {**total, **largest}}
    whole = {**own, **_pod_level(spec, own)}
    overhead = amounts(spec.get("overhead") or {})
    return {name: whole.get(name, 0) + overhead.get(name, 0) for name in {**whole, **overhead}}


def _pod_level(spec: Mapping[str, Any], own: Mapping[str, int]) -> dict[str, int]:
    """What `resources` of the pod itself reserve, instead of its containers; a limit where nothing is requested."""
    resources = spec.get("resources") or {}
    limits, requests = (amounts(resources.get(name) or {}) for name in ("limits", "requests"))
    found = {**{name: limit for name, limit in limits.items() if name not in own}, **requests}
    return {name: amount for name, amount in found.items() if name in _POD_LEVEL or name.startswith("hugepages-")}


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
