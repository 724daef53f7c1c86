"""Claims on devices: what a pod asks for. Pure, on raw specs of pods and ResourceClaimTemplates.

Reads `resource.k8s.io` v1, v1beta2 and v1beta1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices of a class that selectors leave; several classes where alternatives are given."""

    classes: tuple[str, ...]
    selectors: tuple[str, ...] = ()
    tolerations: str = "[]"
    """As JSON, so that equal sets are equal."""

    @property
    def text(self) -> str:
        """Name of the resource in messages: `devices of gpu.nvidia.com`."""
        where = f" where {' && '.join(self.selectors)}" if self.selectors else ""
        tolerating = f" tolerating {self.tolerations}" if self.tolerations != "[]" else ""
        return f"devices of {' or '.join(self.classes)}{where}{tolerating}"


@dataclass(frozen=True, slots=True)
class ClaimRequests:
    """What a claim takes, as far as it is understood: a lower limit where `doubts` tell why."""

    counts: tuple[tuple[DeviceSet, int], ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodClaims:
    """The claims of a pod: templates and claims by name."""

    namespace: str
    templates: tuple[tuple[str, str], ...] = ()
    """Name in the pod, name of the ResourceClaimTemplate."""
    claims: tuple[str, ...] = ()
    """Names of ResourceClaims that pods may share."""


def claims_of_pod(namespace: str, spec: Mapping[str, Any]) -> PodClaims | None:
    """Return the claims of a pod's spec; None for a pod without any."""
    found = spec.get("resourceClaims") or ()
    if not found:
        return None
    return PodClaims(
        namespace,
        tuple((one["name"], one["resourceClaimTemplateName"]) for one in found if one.get("resourceClaimTemplateName")),
        tuple(one["resourceClaimName"] for one in found if one.get("resourceClaimName")),
    )


def requests_of_template(found: Mapping[str, Any]) -> ClaimRequests:
    """Return what each claim of a ResourceClaimTemplate takes."""
    devices = ((found.get("spec") or {}).get("spec") or {}).get("devices") or {}
    counts: list[tuple[DeviceSet, int]] = []
    doubts = ["matchAttribute is not counted"] if devices.get("constraints") else []
    for request in devices.get("requests") or ():
        count, doubt = _request(request)
        counts += count
        doubts += doubt
    return ClaimRequests(tuple(counts), tuple(dict.fromkeys(doubts)))


def _request(request: Mapping[str, Any]) -> tuple[list[tuple[DeviceSet, int]], list[str]]:
    if alternatives := request.get("firstAvailable"):
        classes = tuple(sorted({str(one["deviceClassName"]) for one in alternatives}))
        least = min(int(one.get("count") or 1) for one in alternatives)
        return [(DeviceSet(classes), least)], ["alternatives of firstAvailable are counted as one of them"]
    exact = request.get("exactly") or request  # v1beta1 has the fields in the request itself
    if exact.get("adminAccess"):
        return [], []
    doubts = ["a part of a device's capacity is counted as a device"] if exact.get("capacity") else []
    if exact.get("allocationMode") == "All":
        doubts.append("allocationMode All is counted as one device")
    count = 1 if exact.get("allocationMode") == "All" else int(exact.get("count") or 1)
    return [(_set(exact), count)], doubts


def _set(exact: Mapping[str, Any]) -> DeviceSet:
    selectors: Sequence[Mapping[str, Any]] = exact.get("selectors") or ()
    return DeviceSet(
        (str(exact["deviceClassName"]),),
        tuple(sorted({str((one.get("cel") or {}).get("expression") or "") for one in selectors})),
        json.dumps(list(exact.get("tolerations") or ()), sort_keys=True),
    )
