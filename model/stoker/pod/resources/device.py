"""Devices that drivers publish for dynamic resource allocation: which exist, on which node.

Pure, on raw ResourceSlices of `resource.k8s.io` v1, v1beta2 and v1beta1 (KEP-4381, structured parameters).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.pod.resources.quantity import amount

GROUP = "resource.k8s.io"
_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Those that can be read, the best first."""


class DeviceId(NamedTuple):
    """Name of a device in the cluster."""

    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device, as its driver describes it."""

    id: DeviceId
    node: str = ""
    """Empty for a device that several nodes reach."""
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By domain and name."""
    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    taints: tuple[Mapping[str, Any], ...] = ()
    counter_sets: tuple[str, ...] = ()
    """Names of the counters in its pool that it takes parts of, as the partitions of one GPU do (KEP-4815)."""
    shareable: bool = False
    """Whether several claims may hold it."""

    @property
    def divisible(self) -> bool:
        """Whether several claims may share it, or it takes counters that other devices take too."""
        return self.shareable or bool(self.counter_sets)


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """Part of a pool of devices; the pool counts when all of its newest slices are there."""

    driver: str
    pool: str
    generation: int
    slices: int
    devices: tuple[Device, ...]


def readable_version(served: Collection[str]) -> str:
    """Return the apiVersion to read devices in, of the versions that a server has; empty if none can be read."""
    best = next((version for version in _VERSIONS if version in served), None)
    return f"{GROUP}/{best}" if best else ""


def read_slice(found: Mapping[str, Any]) -> DeviceSlice:
    """Return the devices of a ResourceSlice."""
    spec = found["spec"]
    pool = spec.get("pool") or {}
    driver, name, node = str(spec["driver"]), str(pool.get("name") or ""), str(spec.get("nodeName") or "")
    devices = tuple(_device(item, driver, name, node) for item in spec.get("devices") or ())
    return DeviceSlice(
        driver, name, int(pool.get("generation") or 0), int(pool.get("resourceSliceCount") or 1), devices
    )


def usable_devices(slices: Iterable[DeviceSlice]) -> dict[str, tuple[Device, ...]]:
    """Return the devices of whole pools by node, with those that several nodes reach under the empty name."""
    pools: defaultdict[tuple[str, str], list[DeviceSlice]] = defaultdict(list)
    for found in slices:
        pools[found.driver, found.pool].append(found)
    by_node: defaultdict[str, list[Device]] = defaultdict(list)
    for parts in pools.values():
        newest = max(part.generation for part in parts)
        current = [part for part in parts if part.generation == newest]
        if len(current) >= current[0].slices:
            for device in (device for part in current for device in part.devices):
                by_node[device.node].append(device)
    return {node: tuple(sorted(devices, key=lambda one: one.id)) for node, devices in by_node.items()}


def _device(found: Mapping[str, Any], driver: str, pool: str, node: str) -> Device:
    body = found.get("basic") or found  # v1beta1 nests
    return Device(
        id=DeviceId(driver, pool, str(found["name"])),
        node=node or str(body.get("nodeName") or ""),
        attributes=_by_domain(driver, {name: _attribute(value) for name, value in _items(body, "attributes")}),
        capacity=_by_domain(
            driver, {name: amount(name, value.get("value", "0")) for name, value in _items(body, "capacity")}
        ),
        taints=tuple(body.get("taints") or ()),
        counter_sets=tuple(sorted({sys.intern(str(one["counterSet"])) for one in body.get("consumesCounters") or ()})),
        shareable=bool(body.get("allowMultipleAllocations")),
    )


def _items(body: Mapping[str, Any], name: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return (body.get(name) or {}).items()


def _attribute(value: Mapping[str, Any]) -> Any:
    found = next((value[kind] for kind in ("string", "int", "bool", "version") if kind in value), None)
    return sys.intern(found) if isinstance(found, str) else found


def _by_domain(driver: str, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Names without a domain belong to the driver's."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        domain, _, short = name.rpartition("/")
        found[sys.intern(domain or driver)][sys.intern(short)] = value
    return dict(found)
