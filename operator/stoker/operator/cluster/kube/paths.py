"""URL paths of kinds and objects in the API. Pure.

Called by `kube_cluster` and `service/lease_object`.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.kinds import Kind


def collection(kind: Kind, namespace: str | None) -> str:
    """Path of all objects of a kind, in one namespace or in all. Raises Invalid for what is no name."""
    root = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    inside = f"/namespaces/{_segment('namespace', namespace)}" if kind.namespaced and namespace else ""
    return f"{root}{inside}/{kind.plural}"


def single(kind: Kind, namespace: str, name: str, subresource: str = "") -> str:
    """Path of one object, or of a subresource of it. Raises Invalid for what is no name."""
    path = f"{collection(kind, namespace)}/{_segment('name', name)}"
    return f"{path}/{subresource}" if subresource else path


def _segment(field: str, text: str) -> str:
    """A name as one part of a path. Raises Invalid for one that would be read as another path."""
    if text in (".", "..") or "/" in text or "%" in text:
        raise Invalid(f"metadata.{field}: {text!r} may not be '.' or '..', or contain '/' or '%'")
    return quote(text, safe="")


def selector(labels: Mapping[str, str]) -> str:
    """Label selector for objects that carry all of `labels`."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
