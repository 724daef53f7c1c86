"""What a route needs: the caller's cluster, a namespace, and resources by uid or name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request

from stoker.gateway.cluster.access import Access, Identity
from stoker.gateway.cluster.interface import ApiError, Cluster, Kind, Object, Selection
from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.config import GatewayConfig
from stoker.gateway.domain.names import is_uid
from stoker.gateway.problem import Problem

NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
ID = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"


@dataclass(frozen=True)
class Gateway:
    """What all requests share."""

    config: GatewayConfig
    access: Access
    prometheus: Prometheus
    new_id: Callable[[], str]
    """Never the same twice."""
    agent_wait_s: float = 3.0
    """Longest wait for the GPU metrics of one agent; many are asked for one answer."""
    program_wait_s: float = 10.0
    """Longest wait for the metrics of one router or engine."""


@dataclass(frozen=True)
class Call:
    """One request: who makes it, and the cluster with its rights."""

    gateway: Gateway
    caller: Identity
    cluster: Cluster
    token: str | None = field(repr=False)

    async def renewed(self) -> Call:
        """The same call after its token was reviewed again, for a stream that goes on. Raises Problem 401 or 403."""
        return await identified(self.gateway, self.token)


async def identified(gateway: Gateway, token: str | None) -> Call:
    """A call by the owner of a token. Raises Problem 401 or 403."""
    caller = await gateway.access.identify(token)
    return Call(gateway, caller, gateway.access.as_caller(caller), token)


async def authenticated(request: Request) -> Call:
    """Know the caller. Raises Problem 401 or 403."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return await identified(request.app.state.gateway, token.strip() if scheme.lower() == "bearer" else None)


Caller = Annotated[Call, Depends(authenticated)]
Namespace = Annotated[str | None, Query(pattern=NAMESPACE, description="Default: the gateway's own")]
Namespaces = Annotated[
    str | None,
    Query(pattern=r"^(\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)$", description="`*`: all; default: the gateway's own"),
]
ResourceId = Annotated[str, Path(pattern=ID, description="UUID or name")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$", description="A repeated request does nothing again"
    ),
]
Limit = Annotated[int, Query(ge=1, le=500, description="Items of a page")]
Continue = Annotated[str, Query(alias="continue", max_length=4096, description="Token of the page")]


def one_namespace(call: Call, namespace: str | None) -> str:
    return namespace or call.gateway.config.namespace


def namespaces(call: Call, namespace: str | None) -> str | None:
    """The namespace of a list; None for all."""
    return None if namespace == "*" else one_namespace(call, namespace)


async def find(call: Call, kind: Kind, namespace: str, wanted: str) -> Object:
    """Read a resource by its uid or name. Raises Problem 404."""
    name = await _name_of(call.cluster, kind, namespace, wanted) if is_uid(wanted) else wanted
    try:
        return await call.cluster.get(kind, namespace, name)
    except ApiError as error:
        if error.status != 404:
            raise
        raise Problem(404, "not-found", f"no {kind.name} {wanted} in namespace {namespace}") from error


async def _name_of(cluster: Cluster, kind: Kind, namespace: str, uid: str) -> str:
    """The name of the resource with a uid; the uid itself, which may be a name, where there is none."""
    after = ""
    while True:
        page = await cluster.list(kind, Selection(namespace, metadata_only=True), limit=500, after=after)
        for item in page.items:
            if item["metadata"]["uid"] == uid:
                return str(item["metadata"]["name"])
        after = page.after
        if not after:
            return uid
