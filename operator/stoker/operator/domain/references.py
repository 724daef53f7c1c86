"""References in a manifest: the other objects that a resource's spec or status names. Pure.

Covers the shapes of Kubernetes (volumes, claims, secrets) and of the own kinds (`checkpointRef`, `jobRef`). Called by
the store's index and by `observe`, which then wake and read the users of an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stoker.operator.domain.plan import Key, Object

CLAIM_SCHEME = "pvc://"
"""`pvc://CLAIM/PATH` names a claim."""


class _Shape(NamedTuple):
    kind: str
    fields: tuple[str, ...]
    """Fields of the value that hold the name; none where the value is the name itself."""


_SHAPES: dict[str, _Shape] = {
    "claimName": _Shape("PersistentVolumeClaim", ()),
    "configMap": _Shape("ConfigMap", ("name",)),
    "configMapRef": _Shape("ConfigMap", ("name",)),
    "configMapKeyRef": _Shape("ConfigMap", ("name",)),
    "secret": _Shape("Secret", ("secretName", "name")),
    "secretRef": _Shape("Secret", ("name",)),
    "secretKeyRef": _Shape("Secret", ("name",)),
    "tokenSecretRef": _Shape("Secret", ("name",)),
    "apiKeySecretRef": _Shape("Secret", ("name",)),
    "credentialsSecretRef": _Shape("Secret", ("name",)),
    "uriSecretRef": _Shape("Secret", ("name",)),
    "checkpoint": _Shape("Checkpoint", ("name",)),
    "checkpointRef": _Shape("Checkpoint", ("name",)),
    "currentCheckpoint": _Shape("Checkpoint", ("name",)),
    "resumedFrom": _Shape("Checkpoint", ("name",)),
    "deploymentRef": _Shape("InferenceDeployment", ("name",)),
    "jobRef": _Shape("TrainingJob", ("name",)),
}


def references(resource: Object) -> frozenset[Key]:
    """Objects of the same namespace that spec or status of `resource` name; for a pod only its node."""
    spec = resource.get("spec")
    if resource["kind"] == "Pod":
        node = (spec or {}).get("nodeName")
        return frozenset({Key("Node", "", str(node))}) if node else frozenset()
    namespace = resource["metadata"].get("namespace", "")
    found = {*_walk(spec), *_walk(resource.get("status"))}
    return frozenset(Key(kind, namespace, name) for kind, name in found)


def _walk(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for field, inner in value.items():
            shape = _SHAPES.get(field)
            if shape is not None:
                yield from _names(shape, inner)
            if field == "uri" and isinstance(inner, str) and inner.startswith(CLAIM_SCHEME):
                yield "PersistentVolumeClaim", inner.removeprefix(CLAIM_SCHEME).partition("/")[0]
            yield from _walk(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner)


def _names(shape: _Shape, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value and not shape.fields:
        yield shape.kind, value
    if isinstance(value, Mapping):
        for field in shape.fields:
            name = value.get(field)
            if isinstance(name, str) and name:
                yield shape.kind, name
