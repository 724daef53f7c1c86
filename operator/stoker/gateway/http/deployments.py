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
from stoker.gateway.http.resource_views import (
    EVENTS,
    PageQuery,
    Streamed,
    listed,
    shown,
    watched_one,
)
from stoker.gateway.http.versions import IfNoneMatch
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
    stream: Streamed,
    namespace: Namespaces = None,
    limit: Limit = 100,
    after: Continue = "",
) -> Any:
    """List deployments, or watch them."""
    selection, query = Selection(namespaces(call, namespace)), PageQuery(limit, after)
    return await listed(request, call, DEPLOYMENT, selection, query, stream, deployment_view, DeploymentList)


async def read(
    deployment_id: ResourceId,
    call: Caller,
    stream: Streamed,
    answer: Response,
    namespace: Namespace = None,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Read one deployment, or watch it."""
    found = await find(call, DEPLOYMENT, one_namespace(call, namespace), deployment_id)
    if stream.wanted:
        return await watched_one(call, DEPLOYMENT, found, stream.version, deployment_view)
    return shown(found, answer, if_none_match, deployment_view)
