"""Pruning of objects to the parts that a reconcile may read. With a thousand jobs they fill the operator's memory.

Pure. A pruned object is never written back whole, so nothing is lost in the cluster.

Pure; called by the store.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.labels import ROLE, ZONE, PodRole
from stoker.operator.domain.placement.node_capacity import PIN, pinned_node
from stoker.operator.domain.plan import Object

_CONTENT = ("data", "binaryData", "stringData", "immutable")
"""Content of ConfigMaps and Secrets: their existence and the label with the applied hash are enough."""
_POD_SPEC = ("nodeName", "priority", "schedulingGates", "subdomain")
_POD_STATUS = ("phase", "reason", "message", "podIP")
_POD_CONDITION = ("type", "status", "reason", "message")
_TIMED_CONDITION = (*_POD_CONDITION, "lastTransitionTime")
_TIMED: Mapping[str, tuple[str, ...]] = {
    PodRole.ENGINE: ("Ready", "PodScheduled"),
    PodRole.TRAINER: ("PodScheduled",),
}
"""Conditions whose time is kept: the autoscaler counts with the time until engines are ready, and starts are shown in
their parts."""
_NODE_CONDITION = ("type", "status")
_NODE_LABELS = (ZONE,)
_METADATA = ("managedFields", "selfLink")
_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
LONGEST_SHARED = 64
"""Characters of the longest text that is interned."""


def pruned(resource: Object, old: Object | None = None) -> Object:
    """The object without what no reconcile reads, sharing equal texts and the parts that `old` has too."""
    parts = dict(resource)
    parts["metadata"] = _metadata(resource["metadata"])
    if resource["kind"] in ("ConfigMap", "Secret"):
        for name in _CONTENT:
            parts.pop(name, None)
    if resource["kind"] == "Pod":
        parts |= _pod(parts)
    if resource["kind"] == "Node":
        parts = _node(parts)
    shared: Object = reuse_equal(parts, old)
    return shared


def reuse_equal(value: Any, old: Any = None) -> Any:
    """Equal data with interned field names and short texts, and with the parts of `old` that are equal."""
    if isinstance(value, Mapping):
        if value == old:
            return old
        before = old if isinstance(old, Mapping) else {}
        return {sys.intern(name): reuse_equal(inner, before.get(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if value == old:
            return old
        return [reuse_equal(inner) for inner in value]
    if isinstance(value, str) and len(value) <= LONGEST_SHARED:
        return sys.intern(value)
    return value


def _pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Node or pin, gates, phase, conditions and container states: what a pod waits for and how it ended."""
    parts: dict[str, Any] = {}
    role = str((pod["metadata"].get("labels") or {}).get(ROLE))
    if "spec" in pod:
        parts["spec"] = _some(pod["spec"], _POD_SPEC)
        if (node := pinned_node(pod)) is not None:
            parts["spec"][PIN] = node
    if "status" in pod:
        status = _some(pod["status"], _POD_STATUS)
        if "conditions" in pod["status"]:
            timed = _TIMED.get(role, ())
            status["conditions"] = [
                _some(found, _TIMED_CONDITION if found["type"] in timed else _POD_CONDITION)
                for found in pod["status"]["conditions"]
            ]
        for name in ("initContainerStatuses", "containerStatuses"):
            if name in pod["status"]:
                status[name] = [_container(found, timed=role in _TIMED) for found in pod["status"][name]]
        parts["status"] = status
    return parts


def _container(found: Mapping[str, Any], *, timed: bool) -> dict[str, Any]:
    """State and image; of a running container also the time of its start, where `timed`."""
    state = dict(found.get("state") or {})
    if "running" in state:
        state["running"] = _some(state["running"] or {}, ("startedAt",)) if timed else {}
    left = {"name": found.get("name"), "state": state}
    if "@" in (found.get("imageID") or ""):  # a digest; long, and the same in thousands of pods
        left["imageID"] = sys.intern(found["imageID"])
    return left


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Ready condition and zone, so that heartbeats of a healthy node change nothing."""
    metadata = _some(node["metadata"], ("name", "uid", "resourceVersion", "deletionTimestamp"))
    labels = _some(node["metadata"].get("labels") or {}, _NODE_LABELS)
    if labels:
        metadata["labels"] = labels
    conditions = [found for found in (node.get("status") or {}).get("conditions") or () if found["type"] == "Ready"]
    status = {"conditions": [_some(found, _NODE_CONDITION) for found in conditions]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def _some(value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in metadata.items() if name not in _METADATA}
    annotations = left.get("annotations")
    if annotations:
        left["annotations"] = {name: value for name, value in annotations.items() if name not in _ANNOTATIONS}
    return left
