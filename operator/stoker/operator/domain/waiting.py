"""The reason why a pod does not run yet, in one line that names what is missing. Pure functions on raw pods.

Called for conditions and phases of every kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.plan import Object
from stoker.pod.resources.gpu import GPU, MIG_PREFIX

LONGEST = 400
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
_PULLING = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"})
_STUCK = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "ImageInspectError"}
)
"""Reasons that need a person: the image, or what the container refers to, does not exist."""

_NODES = re.compile(r"^0/(?P<total>\d+) nodes are available: (?P<why>.*?)\.(?: |$)")
_LACK = re.compile(r"^(?P<count>\d+) Insufficient (?P<resource>\S+)$")
_OTHER = re.compile(r"^(?P<count>\d+) (?:node\(s\) )?(?P<text>.*)$")


@dataclass(frozen=True)
class Waiting:
    """The thing that a pod waits for."""

    reason: str
    message: str
    stuck: bool = False
    """Whether waiting alone cannot help."""

    @property
    def line(self) -> str:
        return f"{self.reason}: {self.message}".rstrip(": ")


def waiting(pod: Object) -> Waiting | None:
    """The thing that the pod waits for; None when it runs, has ended, or its cluster reports nothing yet."""
    status = pod.get("status", {})
    containers = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    return _of_containers(containers) or _of_scheduling(status.get("conditions", ()))


def condensed(message: str) -> str:
    """The scheduler's message, shortened to what is missing: `2 of 3 nodes lack nvidia.com/gpu, 1 had taint {a: b}`."""
    text = " ".join(message.split())
    found = _NODES.match(text)
    if found is None:
        return text[:LONGEST]
    parts = [_part(part, found["total"]) for part in re.split(r", (?=\d+ )", found["why"])]
    return ", ".join(sorted(parts, key=lambda part: " lack " not in part))[:LONGEST]


def missing_volume(pod_spec: Mapping[str, Any], present: Mapping[str, set[str]]) -> str | None:
    """The first volume whose object does not exist.

    `present` has the names of existing objects by kind; a kind that is not in it is not checked.
    """
    for volume in pod_spec.get("volumes") or ():
        for kind, name in _sources(volume):
            if kind in present and name not in present[kind]:
                return f"{kind} {name} does not exist (volume {volume.get('name')})"
    return None


def mounting(pod: Object, pod_spec: Mapping[str, Any]) -> str | None:
    """Volumes that the node has to mount before a scheduled pod can start; clusters only report that it has not."""
    conditions = {found["type"]: found["status"] for found in pod.get("status", {}).get("conditions", ())}
    if conditions.get("PodScheduled") != "True" or conditions.get("PodReadyToStartContainers") != "False":
        return None
    named = [_mount(volume) for volume in pod_spec.get("volumes") or ()]
    text = ", ".join(found for found in named if found)
    return f"waiting for the node to mount {text}"[:LONGEST] if text else None


def _mount(volume: Mapping[str, Any]) -> str:
    """One volume in words: `Secret keys (key a, key b)`; empty for what the operator makes itself."""
    source = next(iter(_sources(volume)), None)
    if source is None or (source[0] == "ConfigMap" and str(volume.get("name")).startswith("stoker-")):
        return ""
    items = (volume.get("secret") or volume.get("configMap") or {}).get("items") or ()
    keys = ", ".join(f"key {item.get('key')}" for item in items)
    return f"{source[0]} {source[1]}" + (f" ({keys})" if keys else "")


def _of_containers(containers: Iterable[Mapping[str, Any]]) -> Waiting | None:
    for container in containers:
        found = (container.get("state") or {}).get("waiting")
        if not found:
            continue
        reason = str(found.get("reason") or "Waiting")
        message = " ".join(str(found.get("message") or "").split())
        if reason in _STARTING:
            if message:
                return Waiting(reason, message[:LONGEST])
            continue
        if reason in _PULLING:  # the two take turns; the line stays
            reason, message = "ImagePullBackOff", message.rpartition("ErrImagePull: ")[2]
        return Waiting(reason, message[:LONGEST], reason in _STUCK)
    return None


def _of_scheduling(conditions: Iterable[Mapping[str, Any]]) -> Waiting | None:
    for condition in conditions:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condensed(str(condition.get("message") or ""))
            lacks_gpus = any(f"lack {name}" in message for name in (GPU, MIG_PREFIX))
            return Waiting("WaitingForGPUs" if lacks_gpus else str(condition.get("reason") or "Unschedulable"), message)
    return None


def _part(part: str, total: str) -> str:
    lacking = _LACK.match(part)
    if lacking is not None:
        return f"{lacking['count']} of {total} nodes lack {lacking['resource']}"
    other = _OTHER.match(part)
    return f"{other['count']} {other['text']}" if other is not None else part


def _sources(volume: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield kind and name of each object that the volume cannot be mounted without."""
    config_map, secret, claim = (volume.get(name) for name in ("configMap", "secret", "persistentVolumeClaim"))
    if config_map and not config_map.get("optional"):
        yield "ConfigMap", str(config_map.get("name"))
    if secret and not secret.get("optional"):
        yield "Secret", str(secret.get("secretName"))
    if claim:
        yield "PersistentVolumeClaim", str(claim.get("claimName"))
