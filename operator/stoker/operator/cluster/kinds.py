"""The kinds that the operator reads or writes: their place in the API and their subresources.

A constant table, read by both clusters, the loop and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

GROUP = "stoker.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    name: str
    api_version: str
    plural: str
    short: str = ""
    """Short name on the command line."""
    status: bool = True
    """Whether it has a status subresource."""
    scale: bool = False
    """Whether it has `/scale` over `spec.replicas` and `status.replicas`."""
    namespaced: bool = True

    @property
    def ours(self) -> bool:
        return self.api_version.startswith(GROUP)


_OURS = f"{GROUP}/{VERSION}"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("TrainingJob", _OURS, "trainingjobs", "tj"),
        Kind("Checkpoint", _OURS, "checkpoints", "ckpt"),
        Kind("InferenceDeployment", _OURS, "inferencedeployments", "infd"),
        Kind("EnginePool", _OURS, "enginepools", "epool", scale=True),
        Kind("Pod", "v1", "pods", "po"),
        Kind("Service", "v1", "services", "svc"),
        Kind("ConfigMap", "v1", "configmaps", "cm", status=False),
        Kind("Secret", "v1", "secrets", "", status=False),
        Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims", "pvc"),
        Kind("Event", "v1", "events", "ev", status=False),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets", "pdb"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies", "netpol", status=False),
        Kind("Node", "v1", "nodes", "no", namespaced=False),
    )
}

FOREIGN: dict[str, Kind] = {"PodGroup": Kind("PodGroup", "scheduling.volcano.sh/v1beta1", "podgroups")}
"""Kinds that only some clusters have: applied where they exist, never listed. The body names the version."""


def device_kinds(api_version: str) -> dict[str, Kind]:
    """Return the kinds of dynamic resource allocation, in the version that the API server has."""
    return {
        kind.name: kind
        for kind in (
            Kind("ResourceSlice", api_version, "resourceslices", status=False, namespaced=False),
            Kind("DeviceClass", api_version, "deviceclasses", status=False, namespaced=False),
            Kind("ResourceClaimTemplate", api_version, "resourceclaimtemplates", status=False),
            Kind("ResourceClaim", api_version, "resourceclaims"),
        )
    }


OURS = tuple(name for name, kind in KINDS.items() if kind.ours)
"""The kinds that have a reconciler."""


def find_kind(word: str) -> Kind:
    """Find a kind by its name, plural or short name, in any case.

    Raises:
        ValueError: there is no such kind; the message lists those that exist.
    """
    for kind in KINDS.values():
        if word.lower() in {kind.name.lower(), kind.plural, kind.short} - {""}:
            return kind
    meant = _meant(word.lower())
    known = ", ".join(f"{kind.plural} ({kind.short})" if kind.short else kind.plural for kind in KINDS.values())
    raise ValueError(f"unknown kind {word!r}{f', did you mean {meant}' if meant else ''}; known are {known}")


def _meant(word: str) -> str:
    """The name that ends like the word (job, deployments), else the nearest one; empty where none is near."""
    names = [name.lower() for kind in KINDS.values() for name in (kind.name, kind.plural)]
    ends = [name for name in names if len(word) > 2 and name.endswith(word)]
    near = ends or get_close_matches(word, names)
    return near[0] if near else ""
