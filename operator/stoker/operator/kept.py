"""What the operator keeps of an object: the parts that a reconcile may read. With a thousand jobs this is what its memory is made of.

Pure. An object that is kept is never written back whole, so nothing is lost in the cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from stoker.operator.plan import Object

_CONTENT = ("data", "binaryData", "stringData", "immutable")
"""Of ConfigMaps and Secrets: whether they exist and what was applied last (a label) is enough; secrets have no business here."""
_POD_SPEC = ("nodeName", "schedulingGates", "subdomain")
_METADATA = ("managedFields", "selfLink")
_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
LONGEST_SHARED = 64
"""Characters. Shorter texts are kept once, however many objects say them."""


def kept(resource: Object, old: Object | None = None) -> Object:
    """The object without what no reconcile reads; equal texts are one text in memory, and so is what has not changed since `old`."""
    parts = dict(resource)
    parts["metadata"] = _metadata(resource["metadata"])
    if resource["kind"] in ("ConfigMap", "Secret"):
        for name in _CONTENT:
            parts.pop(name, None)
    if resource["kind"] == "Pod" and "spec" in parts:
        parts["spec"] = {name: parts["spec"][name] for name in _POD_SPEC if name in parts["spec"]}
    shared: Object = share(parts, old)
    return shared


def share(value: Any, old: Any = None) -> Any:
    """The same plain data with short texts and all field names shared, and with the parts of `old` that are equal."""
    if isinstance(value, Mapping):
        if value == old:
            return old
        before = old if isinstance(old, Mapping) else {}
        return {sys.intern(name): share(inner, before.get(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if value == old:
            return old
        return [share(inner) for inner in value]
    if isinstance(value, str) and len(value) <= LONGEST_SHARED:
        return sys.intern(value)
    return value


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in metadata.items() if name not in _METADATA}
    annotations = left.get("annotations")
    if annotations:
        left["annotations"] = {name: value for name, value in annotations.items() if name not in _ANNOTATIONS}
    return left
