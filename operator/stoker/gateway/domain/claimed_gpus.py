"""GPUs that drivers publish in ResourceSlices, and the ResourceClaims that hold some of them. Pure.

A driver is one of GPUs when its name begins with `gpu.`, as those of all vendors do (`gpu.nvidia.com`). Partitions of
one GPU, which take parts of the same counters (KEP-4815), are one GPU: it is free when no claim holds a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stoker.pod.resources.device import Device, read_slice, usable_devices
from stoker.pod.resources.device_allocation import allocated_claim
from stoker.pod.resources.gpu import is_gpu_driver
from stoker.pod.resources.taint import repels

Object = Mapping[str, Any]


class Unit(NamedTuple):
    """A whole GPU: a device, or the counters that its partitions share."""

    driver: str
    pool: str
    name: str


class DeviceCount(NamedTuple):
    """GPUs of one driver on one node."""

    total: int
    free: int


class ClaimedGpus:
    """The GPUs of dynamic resource allocation at one moment.

    Args:
        slices: all ResourceSlices.
        claims: ResourceClaims of all namespaces, or of those whose pods are counted.
    """

    def __init__(self, slices: Iterable[Object] = (), claims: Iterable[Object] = ()) -> None:
        self._devices = usable_devices(read_slice(found) for found in slices if is_gpu_driver(found["spec"]["driver"]))
        self._held = {
            (found["metadata"].get("namespace", ""), found["metadata"]["name"]): claim.devices
            for found in claims
            if (claim := allocated_claim(found)) is not None
        }

    def counts(self) -> dict[str, dict[str, DeviceCount]]:
        """Count the GPUs of each node by driver. Devices that several nodes reach belong to none of them."""
        taken = {held for devices in self._held.values() for held in devices}
        return {
            node: {driver: _count(devices, taken) for driver, devices in _by_driver(found).items()}
            for node, found in self._devices.items()
            if node
        }

    def held_by(self, pod: Object) -> int:
        """GPUs that the claims of a pod hold; a claim that several pods share counts for each of them."""
        namespace = pod["metadata"].get("namespace", "")
        held = (self._held.get((namespace, name), ()) for name in claim_names(pod))
        return sum(is_gpu_driver(device.driver) for devices in held for device in devices)


def claim_names(pod: Object) -> Iterator[str]:
    """Yield the names of a pod's ResourceClaims: given ones, and those made from templates."""
    made = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    by_entry = {one["name"]: one.get("resourceClaimName") for one in made}
    for entry in pod["spec"].get("resourceClaims") or ():
        name = entry.get("resourceClaimName") or by_entry.get(entry["name"])
        if name:
            yield str(name)


def _by_driver(devices: Iterable[Device]) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for device in devices:
        found.setdefault(device.id.driver, []).append(device)
    return found


def _count(devices: Sequence[Device], taken: set[Any]) -> DeviceCount:
    units = {unit for device in devices for unit in _units(device)}
    kept = {unit for device in devices if device.id in taken or repels(device.taints, ()) for unit in _units(device)}
    return DeviceCount(len(units), len(units - kept))


def _units(device: Device) -> tuple[Unit, ...]:
    driver, pool, name = device.id
    return tuple(Unit(driver, pool, f"counters {one}") for one in device.counter_sets) or (Unit(driver, pool, name),)
