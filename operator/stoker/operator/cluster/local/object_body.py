"""Parts of an object's body, and copies of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.cluster.local.merge import Intent
from stoker.operator.domain.plan import Key, Object

DEFAULT_GRACE_S = 30

USER_METADATA = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")
SERVER_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


def matches(resource: Object, labels: Mapping[str, str] | None) -> bool:
    """Whether the object has all of `labels`."""
    held = resource["metadata"].get("labels") or {}
    return all(held.get(name) == value for name, value in (labels or {}).items())


def key_of(resource: Object) -> Key:
    """Kind, namespace and name of an object."""
    return Key(resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"])


def with_namespace(body: Object) -> Object:
    """The body in the namespace `default` where it names none."""
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or metadata.get("namespace"):
        return body
    return {**body, "metadata": {**metadata, "namespace": "default"}}


def intent_of(body: Object) -> Intent:
    """What a manager asks for: the body without status and without the fields that the server owns."""
    metadata = {name: body["metadata"][name] for name in USER_METADATA if name in body["metadata"]}
    intent: Intent = copy_plain({**{name: body[name] for name in body if name != "status"}, "metadata": metadata})
    return intent


def finalizers_of(resource: Object) -> set[str]:
    return set(resource["metadata"].get("finalizers") or ())


def content_of(resource: Object) -> Object:
    """The fields whose change makes a new generation."""
    return {name: value for name, value in resource.items() if name not in ("metadata", "status")}


def grace_s_of(resource: Object, asked_s: int | None) -> int:
    """Grace period in seconds of a pod with processes; 0 for everything else."""
    started = bool((resource.get("spec") or {}).get("nodeName"))
    ended = (resource.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if resource["kind"] != "Pod" or not started or ended:
        return 0
    if asked_s is not None:
        return asked_s
    return max(1, int(resource["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)))


def copy_plain(value: Any) -> Any:
    """A deep copy of plain JSON data."""
    if isinstance(value, Mapping):
        return {key: copy_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copy_plain(inner) for inner in value]
    return value
