"""Deployments: list, watch, read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from stoker.gateway.cluster.interface import DEPLOYMENT, Selection
from stoker.gateway.domain.views import deployment_view
from stoker.gateway.http.caller import (
    Caller,
    Continue,
    Limit,
    Namespace,
    Namespaces,
    ResourceId,
    find,
    namespaces,
    one_namespace,
)
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.jobs import EVENTS, Version, Watch
from stoker.gateway.http.stream import wants_stream, watched
from stoker.gateway.http.versions import IfNoneMatch, etag, matches
from stoker.gateway.models import Deployment, DeploymentList


def deployment_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/deployments", tags=["serving"], responses=ERRORS)
    router.add_api_route("", list_deployments, methods=["GET"], response_model=DeploymentList, responses={200: EVENTS})
    router.add_api_route(
        "/{deployment_id}",
        read,
        methods=["GET"],
        response_model=Deployment,
        responses={200: EVENTS, 304: {"description": "Unchanged"}},
    )
    return router


async def list_deployments(
    request: Request,
    call: Caller,
    namespace: Namespaces = None,
    limit: Limit = 100,
    after: Continue = "",
    watch: Watch = False,
    resource_version: Version = None,
) -> Any:
    """List deployments, or watch them."""
    selection = Selection(namespaces(call, namespace))
    if wants_stream(request, watch):
        return await watched(request, call.cluster, DEPLOYMENT, selection, resource_version, deployment_view)
    page = await call.cluster.list(DEPLOYMENT, selection, limit=limit, after=after)
    items = [deployment_view(item) for item in page.items]
    return DeploymentList(items=items, next=page.after, resource_version=page.resource_version)


async def read(
    request: Request,
    deployment_id: ResourceId,
    call: Caller,
    answer: Response,
    namespace: Namespace = None,
    watch: Watch = False,
    resource_version: Version = None,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Read one deployment, or watch it."""
    found = await find(call, DEPLOYMENT, one_namespace(call, namespace), deployment_id)
    if wants_stream(request, watch):
        one = Selection(found["metadata"]["namespace"], name=found["metadata"]["name"])
        return await watched(request, call.cluster, DEPLOYMENT, one, resource_version, deployment_view)
    if if_none_match is not None and matches(if_none_match, found):
        return Response(status_code=304, headers={"ETag": etag(found)})
    answer.headers["ETag"] = etag(found)
    return deployment_view(found)
