"""The interface of the gateway to a cluster: objects in, objects out, refusals with the API server's reason."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stoker.pod.log_position import LogRequest

Object = dict[str, Any]
"""A resource as plain JSON data."""


@dataclass(frozen=True)
class Kind:
    """A resource of the API."""

    name: str
    api_version: str
    plural: str


JOB = Kind("TrainingJob", "stoker.dev/v1alpha1", "trainingjobs")
CHECKPOINT = Kind("Checkpoint", "stoker.dev/v1alpha1", "checkpoints")
DEPLOYMENT = Kind("InferenceDeployment", "stoker.dev/v1alpha1", "inferencedeployments")
ENGINE_POOL = Kind("EnginePool", "stoker.dev/v1alpha1", "enginepools")
POD = Kind("Pod", "v1", "pods")
NODE = Kind("Node", "v1", "nodes")
EVENT = Kind("Event", "v1", "events")


@dataclass(frozen=True)
class Cause:
    """One wrong field, as the cluster names it."""

    field: str
    message: str


class ApiError(Exception):
    """The cluster refused a request. `status` is its HTTP code, 0 when it did not answer."""

    def __init__(
        self, status: int, reason: str, message: str, causes: Sequence[Cause] = (), retry_after: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.causes = tuple(causes)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    items: Sequence[Object]
    resource_version: str
    """Version to watch from."""
    after: str = ""
    """Token of the next page; empty at the end."""


@dataclass(frozen=True)
class Selection:
    """The part of a kind that a list or a watch shows."""

    namespace: str | None = None
    """None: all namespaces."""
    labels: Mapping[str, str] | None = None
    name: str | None = None
    metadata_only: bool = False


@dataclass(frozen=True)
class Change:
    """One event of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Object


@dataclass(frozen=True)
class Target:
    """A port of a Service or a Pod, as the API server's proxy reaches it."""

    plural: Literal["services", "pods"]
    namespace: str
    name: str
    port: int


@dataclass(frozen=True)
class Relayed:
    """An answer of a program in the cluster. `chunks` must be read to the end, or `close` called."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    close: Callable[[], Awaitable[None]]


class Watch(Protocol):
    """Changes as they come. `aclose` ends the request, also before the first change was read."""

    def __aiter__(self) -> AsyncIterator[Change]: ...

    async def __anext__(self) -> Change: ...

    async def aclose(self) -> None: ...


class Cluster(Protocol):
    """The calls of the gateway, with the rights of one caller. Every call may raise an `ApiError`."""

    async def versions(self, group: str) -> Sequence[str]:
        """List the served versions of an API group; none without the group."""

    async def list(self, kind: Kind, selection: Selection, *, limit: int = 0, after: str = "") -> Page:
        """List a page; `limit` 0 is the server's own size."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object: ...

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        """Patch by JSON merge; `metadata.uid` and `metadata.resourceVersion` in the body are preconditions (409)."""

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: str | None = None) -> None:
        """Begin to delete one exact object; another uid or version is a 409."""

    async def watch(self, kind: Kind, selection: Selection, resource_version: str) -> Watch:
        """Begin to watch; the changes after a version, until the server ends the watch.

        A version that is too old is a 410, at the beginning or on the way.
        """

    async def relay(
        self, target: Target, method: str, path: str, body: bytes | None = None, api_key: str | None = None
    ) -> Relayed:
        """Send an HTTP request to a program in the cluster, through the API server's proxy.

        The caller needs the right `services/proxy` or `pods/proxy`. `body` is JSON; `api_key` is the program's own.
        """

    def log(self, namespace: str, pod: str, request: LogRequest, *, follow: bool) -> AsyncGenerator[Sequence[str]]:
        """Yield the lines of a pod's log, each with its time before it where the cluster has one.

        None come first, when the answer begins.
        """


async def list_all(cluster: Cluster, kind: Kind, selection: Selection, *, page: int = 500) -> tuple[list[Object], str]:
    """List everything page by page; the objects, and the version of the first page."""
    found: list[Object] = []
    first = after = ""
    while True:
        part = await cluster.list(kind, selection, limit=page, after=after)
        found.extend(part.items)
        first, after = first or part.resource_version, part.after
        if not after:
            return found, first
