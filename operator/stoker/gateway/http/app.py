"""The application: all routes, errors as problem documents, probes, the gateway's own metrics."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from stoker.gateway.cluster.interface import ApiError
from stoker.gateway.http.caller import Gateway, authenticated
from stoker.gateway.http.checkpoints import checkpoint_routes
from stoker.gateway.http.cluster import cluster_routes
from stoker.gateway.http.console import console_routes
from stoker.gateway.http.deployments import deployment_routes
from stoker.gateway.http.errors import add_handlers, problem_schema
from stoker.gateway.http.job_actions import job_action_routes
from stoker.gateway.http.jobs import job_routes
from stoker.gateway.http.logs import log_routes
from stoker.gateway.http.metric_history import metric_history_routes
from stoker.gateway.http.no_body import known_body
from stoker.gateway.http.query import known_query
from stoker.gateway.http.requests import RequestGuard
from stoker.gateway.http.run_history import run_history_routes
from stoker.gateway.http.serving import serving_routes
from stoker.gateway.models import Health

VERSION = "1.0.0"
DESCRIPTION = (
    "Training jobs, checkpoints, deployments and the cluster. Every request needs a bearer token, and may do what its "
    "owner may do in the cluster. Errors are problem documents (RFC 9457)."
)


def make_app(gateway: Gateway) -> FastAPI:
    """Build the application."""
    app = FastAPI(
        title="Stoker gateway",
        version=VERSION,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.registry = CollectorRegistry()
    for router in (
        job_routes(),
        job_action_routes(),
        log_routes(),
        metric_history_routes(),
        checkpoint_routes(),
        run_history_routes(),
        deployment_routes(),
        serving_routes(),
        cluster_routes(),
    ):
        checks = [Depends(authenticated), Depends(known_query), Depends(known_body)]
        app.include_router(router, dependencies=checks)
    app.add_api_route("/health", health, methods=["GET"], response_model=Health, responses={503: {"model": Health}})
    for path, probe in (("/livez", livez), ("/readyz", health), ("/metrics", metrics)):
        app.add_api_route(path, probe, methods=["GET"], include_in_schema=False)
    app.router.routes.extend(console_routes())
    add_handlers(app)
    app.add_middleware(RequestGuard, registry=app.state.registry)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


async def livez() -> Response:
    """Answer: the process runs."""
    return Response("ok\n", media_type="text/plain")


async def health(request: Request) -> JSONResponse:
    """Whether the cluster answers."""
    try:
        await request.app.state.gateway.access.check()
    except ApiError as error:
        return JSONResponse(Health(status="unhealthy", detail=str(error)).model_dump(), 503)
    return JSONResponse(Health(status="healthy", detail="").model_dump())


async def metrics(request: Request) -> Response:
    """The gateway's own metrics."""
    return Response(generate_latest(request.app.state.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the problem document and the bearer token."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found["components"]["schemas"]
        problem = problem_schema()
        schemas.update(problem.pop("$defs", {}))
        schemas["ProblemDocument"] = problem
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
        app.openapi_schema = found
    return app.openapi_schema
