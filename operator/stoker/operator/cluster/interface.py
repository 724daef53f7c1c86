"""The cluster as the operator sees it: raw objects in, raw objects out, one error tree. `KubeCluster` and
`LocalCluster` pass one contract suite.

Nothing here decides anything; whoever calls it handles conflicts by looking again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stoker.operator.domain.plan import Call, Object, Ref


class ClusterError(Exception):
    """The cluster did not do what was asked. Subclasses say why; a plain one is a transport failure."""


class NotFound(ClusterError):
    """404: no such object."""


class AlreadyExists(ClusterError):
    """409 on create: the name is taken."""


class Conflict(ClusterError):
    """409: the object changed since it was read, or another object has the name (uid precondition)."""


class NameTaken(Conflict):
    """An object of somebody else has the name that one of ours must have: a person must act."""


class Gone(ClusterError):
    """410: the resource version is too old to watch from; list again."""


class Invalid(ClusterError):
    """400 or 422: the object is refused; the message names the field. Trying again cannot help."""


class Forbidden(ClusterError):
    """401 or 403."""


class NamespaceTerminating(Forbidden):
    """The namespace is being deleted: nothing can be made in it any more."""


class TooManyRequests(ClusterError):
    """429: slow down."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerError(ClusterError):
    """5xx."""


class PodUnreachable(ClusterError):
    """The pod did not answer a poll or a control call (not started, gone, too busy)."""


class PodRefused(ClusterError):
    """The pod answered a control call with an error; the message carries its status and body."""


Keep = Callable[[Object], Object]


@dataclass(frozen=True)
class Listing:
    """One consistent view of a kind."""

    items: tuple[Object, ...]
    resource_version: str
    """Watch from here on."""


@dataclass(frozen=True)
class WatchEvent:
    """One change. A bookmark's object carries nothing but the resource version."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


class Cluster(Protocol):
    """Every call raises a `ClusterError`. Objects that go in are never mutated; objects that come out belong to the caller, who must not change them."""

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        """All objects of a kind (of one namespace; with these labels).

        `keep` says what is kept of each; it is asked while the list is being read, so that the whole is never in
        memory.
        """

    def watch(self, kind: str, resource_version: str, *, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Changes after `resource_version`, until the server ends the watch.

        Raises:
            Gone: the version is too old (at the start or on the way).
        """

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        """Raises NotFound."""

    async def create(self, body: Object) -> Object:
        """POST; the answer carries uid and resourceVersion. Raises AlreadyExists, Invalid."""

    async def apply(self, body: Object, *, manager: str) -> Object:
        """Server-side apply with force: fields that `manager` applied before and now leaves out are removed; fields of others stay. Creates when absent."""

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        """JSON merge patch. Raises NotFound; Conflict when the uid differs, or `metadata.resourceVersion` in the body does; Invalid."""

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        """Replace `status`, nothing else. Raises NotFound; Conflict when the uid or the given version differs."""

    async def scale(self, ref: Ref, replicas: int) -> None:
        """Write `/scale`. Raises NotFound, Conflict on another uid, Invalid for a kind without it."""

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        """Begin to delete, dependents in the background. `grace_s` 0 removes a pod whose node cannot end it any more. The object as it is while it ends, None when it is gone at once. Raises NotFound; Conflict when the uid differs."""

    async def call(self, call: Call) -> Mapping[str, Any]:
        """A signed control call to a pod; the JSON answer. Raises PodUnreachable, PodRefused."""

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        """The pod's `/status`. Raises PodUnreachable."""
