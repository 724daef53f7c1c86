"""Devices that a ResourceClaim holds. Pure, on raw claims of `resource.k8s.io` v1, v1beta2 and v1beta1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.pod.resources.device import DeviceId

_POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


@dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim that has its devices."""

    devices: tuple[DeviceId, ...]
    pod_uid: str = ""
    """Of the pod that it was made for from a template; empty for one with a name of its own."""
    pod_claim: str = ""
    """Its name in that pod."""


def allocated_claim(found: Mapping[str, Any]) -> Claim | None:
    """Return what a ResourceClaim holds; None while it has no devices."""
    allocation = (found.get("status") or {}).get("allocation")
    if allocation is None:
        return None
    metadata = found["metadata"]
    results = (allocation.get("devices") or {}).get("results") or ()
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("kind") == "Pod"]
    return Claim(
        tuple(DeviceId(one["driver"], one["pool"], one["device"]) for one in results if not one.get("adminAccess")),
        owners[0] if owners else "",
        str((metadata.get("annotations") or {}).get(_POD_CLAIM_NAME) or ""),
    )
