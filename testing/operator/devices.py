"""Objects of dynamic resource allocation as drivers, users and the scheduler write them, `resource.k8s.io/v1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.operator.domain.plan import Object

DRIVER = "gpu.example.com"
API = "resource.k8s.io/v1"


def device(name: str, **attributes: str | int | bool) -> dict[str, Any]:
    kinds = {str: "string", bool: "bool", int: "int"}
    values = {key: {kinds[type(value)]: value} for key, value in attributes.items()}
    return {"name": name, "attributes": values, "capacity": {"memory": {"value": "80Gi"}}}


def resource_slice(node: str, devices: Sequence[Mapping[str, Any]], **pool: Any) -> Object:
    part = pool.pop("part", 0)
    whole = {"name": node, "generation": 1, "resourceSliceCount": 1, **pool}
    spec = {"driver": DRIVER, "pool": whole, "nodeName": node, "devices": list(devices)}
    return made("ResourceSlice", f"{node}-{whole['generation']}-{part}", spec=spec)


def device_class(name: str, *expressions: str, extended: str = "") -> Object:
    """A class; `extended` is the extended resource that its devices stand for."""
    named = {"extendedResourceName": extended} if extended else {}
    return made("DeviceClass", name, spec={"selectors": [cel(found) for found in expressions], **named})


def cel(expression: str) -> dict[str, Any]:
    return {"cel": {"expression": expression}}


def request(name: str, class_name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
    exactly = {"deviceClassName": class_name, "allocationMode": "ExactCount", "count": count, **fields}
    return {"name": name, "exactly": exactly}


def template(name: str, *requests: Mapping[str, Any], namespace: str = "default", **devices: Any) -> Object:
    spec = {"spec": {"devices": {"requests": list(requests), **devices}}}
    return made("ResourceClaimTemplate", name, namespace, spec=spec)


def claim(name: str, devices: Sequence[tuple[str, str]], *, pod: str = "", entry: str = "gpu") -> Object:
    """A claim that holds devices, given as (pool, device); `pod` is the uid of the pod that it was made for."""
    results = [{"request": "r", "driver": DRIVER, "pool": pool, "device": found} for pool, found in devices]
    found = made("ResourceClaim", name, "default", spec={})
    found["status"] = {"allocation": {"devices": {"results": results}}}
    if pod:
        found["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod}]
        found["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": entry}
    return found


def made(kind: str, name: str, namespace: str = "", **body: Any) -> Object:
    metadata: dict[str, Any] = {"name": name, "uid": f"uid-{kind}-{name}", "resourceVersion": "1"}
    return {
        "apiVersion": API,
        "kind": kind,
        "metadata": metadata | ({"namespace": namespace} if namespace else {}),
        **body,
    }
