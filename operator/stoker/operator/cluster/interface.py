"""The interface to a cluster: raw objects in, raw objects out, one tree of errors.

`KubeCluster` and `LocalCluster` implement it and pass one contract suite. Nothing here decides; a caller handles a
conflict by observing again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stoker.operator.domain.plan import ControlCall, Object, Ref


class ClusterError(Exception):
    """The cluster did not carry out the request: the subclass is the reason, this class a transport failure."""


class NotFound(ClusterError):
    """404: no such object."""


class Unserved(NotFound):
    """404: the server has no such kind of objects; its definition is not installed."""


class AlreadyExists(ClusterError):
    """409 on create: the name is taken."""


class Conflict(ClusterError):
    """409: the object changed since it was read, or another object has the name (uid precondition)."""


class NameTaken(Conflict):
    """An object of another owner has the name that one of ours must have: a person must act."""


class Gone(ClusterError):
    """410: the resource version is too old to watch from; the caller lists again."""


class Invalid(ClusterError):
    """400 or 422: the object is refused; the message names the field. A retry cannot help."""


class Forbidden(ClusterError):
    """401 or 403: the credentials do not allow the request."""


class Unauthorized(Forbidden):
    """401: the server does not know the credentials, or they have expired."""


class NamespaceTerminating(Forbidden):
    """The namespace is being deleted: nothing can be made in it any more."""


class TooManyRequests(ClusterError):
    """429: too many requests; the server may name a time to wait."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerError(ClusterError):
    """5xx: the server failed."""


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
    """The version to watch from."""


@dataclass(frozen=True)
class WatchEvent:
    """One change. A bookmark's object carries nothing but the resource version."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


class Cluster(Protocol):
    """The calls that the operator may make. Every call may raise a `ClusterError`.

    Arguments are never mutated. Returned objects may be kept, and must not be changed.
    """

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        """List the objects of a kind, of one namespace and with these labels if given.

        `keep` reduces each object while the list is being read, so that the whole list is never in memory.
        """

    def watch(self, kind: str, resource_version: str, *, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield changes after `resource_version`, until the server ends the watch.

        Raises:
            Gone: the version is too old (at the start or on the way).
        """

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        """Read one object. Raises NotFound."""

    async def create(self, body: Object) -> Object:
        """Create by POST; the answer carries uid and resourceVersion. Raises AlreadyExists, Invalid."""

    async def apply(self, body: Object, *, manager: str) -> Object:
        """Apply on the server with force, or create.

        Fields that `manager` applied before and leaves out now are removed; fields of other managers stay.
        """

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        """Patch by JSON merge.

        Raises:
            Conflict: the uid differs, or `metadata.resourceVersion` in the body does.
            NotFound, Invalid.
        """

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        """Replace `status`, nothing else. Raises NotFound; Conflict when the uid or the given version differs."""

    async def scale(self, ref: Ref, replicas: int) -> None:
        """Write `/scale`. Raises NotFound, Conflict on another uid, Invalid for a kind without it."""

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        """Begin to delete an object; its dependents follow in the background.

        Args:
            grace_s: 0 removes a pod whose node cannot end it.

        Returns:
            The object while it ends, None when it is gone at once.

        Raises:
            Conflict: the uid differs.
            NotFound.
        """

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        """Send a signed control call to a pod and return the JSON answer. Raises PodUnreachable, PodRefused."""

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        """Read the pod's `/status`. Raises PodUnreachable."""
