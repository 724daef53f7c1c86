"""The GPUs of this machine and which pod has them. A pod that asks for none sees none.

Owned by the node: `pod_schedule` takes GPUs, and the end of a pod returns them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.operator.domain.plan import Object

RESOURCE = "nvidia.com/gpu"


class Gpus:
    """The devices of this machine. Each belongs to one pod at a time."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._held: dict[str, tuple[str, ...]] = {}

    @property
    def free(self) -> tuple[str, ...]:
        held = {device for devices in self._held.values() for device in devices}
        return tuple(device for device in self.devices if device not in held)

    def take(self, uid: str, count: int) -> tuple[str, ...] | None:
        """Give a pod `count` devices; None when too few are free. A pod that has devices keeps them."""
        if uid not in self._held:
            if count > len(self.free):
                return None
            self._held[uid] = self.free[:count]
        return self._held[uid]

    def give_back(self, uid: str) -> None:
        self._held.pop(uid, None)


def wanted_gpus(pod: Object) -> int:
    """Number of GPUs in the pod's limits, or else in its requests."""
    resources = pod["spec"]["containers"][0].get("resources") or {}
    asked = (resources.get("limits") or {}).get(RESOURCE) or (resources.get("requests") or {}).get(RESOURCE) or 0
    return int(asked)


def find_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Find the devices: `CUDA_VISIBLE_DEVICES` if it is set, else the driver's device files."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(device.strip() for device in chosen.split(",") if device.strip())
    files = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]  # noqa: PTH208 - bare names
    return tuple(sorted((name[6:] for name in files), key=int)) if Path("/dev").exists() else ()
