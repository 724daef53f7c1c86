"""One request to an API server, named as RBAC names it: verb, resource, subresource, namespace, name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WRITES = frozenset({"create", "apply", "patch", "update", "delete", "deletecollection"})
_BY_METHOD = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class ApiCall:
    """A request as RBAC names it.

    `resource` is a plural; `verb` distinguishes apply from patch and list from watch.
    """

    verb: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def what(self) -> str:
        """Resource with subresource: `pods`, `enginepools/scale`."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


def parse_call(method: str, path: str, query: Mapping[str, str], content_type: str = "") -> ApiCall | None:
    """Return the call behind an HTTP request; None for a path without a resource (discovery, health, metrics)."""
    parts = _resource_parts(path)
    if not parts:
        return None
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    resource, name, subresource = (*parts, "", "")[:3]
    return ApiCall(_verb(method, name, query, content_type), resource, subresource, namespace, name)


def _resource_parts(path: str) -> list[str]:
    """Return the path after group and version: `["namespaces", "a", "pods", "b", "status"]`."""
    parts = path.strip("/").split("/")
    before = {"api": 2, "apis": 3}.get(parts[0])
    return parts[before:] if before else []


def _verb(method: str, name: str, query: Mapping[str, str], content_type: str) -> str:
    if method == "GET" and query.get("watch", "") in ("true", "True", "1"):
        return "watch"
    if method == "GET" and not name:
        return "list"
    if method == "DELETE" and not name:
        return "deletecollection"
    if method == "PATCH" and content_type.startswith("application/apply-patch"):
        return "apply"
    return _BY_METHOD.get(method, method.lower())
