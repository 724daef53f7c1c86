"""What a deployment serves: engines and traffic, chat through the API server's proxy, promotion and roll back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header
from fastapi.responses import Response, StreamingResponse

from stoker.gateway.cluster.interface import (
    CHECKPOINT,
    DEPLOYMENT,
    ENGINE_POOL,
    POD,
    ApiError,
    Cluster,
    Object,
    Selection,
    Target,
    list_all,
)
from stoker.gateway.cluster.whole_answer import start_of
from stoker.gateway.domain.metric_task import port_of
from stoker.gateway.domain.resumption import usable
from stoker.gateway.domain.serving import (
    earlier_revision,
    engine_load,
    engine_port,
    engine_states,
    service_of,
    summed,
    traffic,
)
from stoker.gateway.domain.states import phase_of
from stoker.gateway.domain.views import deployment_view
from stoker.gateway.http.caller import Call, Caller, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.program_metrics import metrics_of, refusal_message
from stoker.gateway.http.stream import MEDIA_TYPE, ClosingStream
from stoker.gateway.http.versions import IfMatch, etag, patch
from stoker.gateway.models import Deployment, PromoteRequest, RollBackRequest
from stoker.gateway.observations import EngineLoad, Serving, Traffic
from stoker.gateway.problem import Problem, wrong_field

MAX_ENGINES = 32
"""Engines whose metrics are read for one answer."""
ROUTERS = {"stoker.dev/role": "router"}
DEPLOYMENT_UID = "stoker.dev/deployment-uid"
MAX_REFUSAL_BYTES = 64 << 10
KEY = r"^[\x21-\x7e]+$"
COMPLETION: dict[str, Any] = {
    "description": "The deployment's answer, or with `stream` its events",
    "content": {"application/json": {}, MEDIA_TYPE: {}},
}


def serving_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/deployments/{deployment_id}", tags=["serving"], responses=ERRORS)
    router.add_api_route("/serving", serving, methods=["GET"], response_model=Serving)
    router.add_api_route(
        "/chat/completions", chat, methods=["POST"], responses={200: COMPLETION}, response_class=StreamingResponse
    )
    router.add_api_route("/promote", promote, methods=["POST"], status_code=202, response_model=Deployment)
    router.add_api_route("/rollback", roll_back, methods=["POST"], status_code=202, response_model=Deployment)
    return router


async def serving(deployment_id: ResourceId, call: Caller, namespace: Namespace = None) -> Serving:
    """Read engines and traffic now. Metrics need the rights `services/proxy` and `pods/proxy`.

    The counters of several routers are read from each, which needs the right to list pods.
    """
    found = await find(call, DEPLOYMENT, one_namespace(call, namespace), deployment_id)
    pools = await _pools(call.cluster, found)
    unavailable: dict[str, str] = {}
    counted, loads = await asyncio.gather(_traffic(call, found, unavailable), _loads(call, pools.values(), unavailable))
    return Serving(
        deployment_id=found["metadata"]["uid"],
        measured_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        routers=_num_routers(found),
        traffic=counted,
        engines=engine_states(pools, loads),
        unavailable=unavailable,
    )


async def _pools(cluster: Cluster, deployment: Object) -> dict[str, Object]:
    """The EnginePools of a deployment that exist, by the name of the pool in its spec."""
    pools = (deployment.get("status") or {}).get("pools") or ()
    found = {}
    for name, stored in [(pool["name"], pool["enginePool"]) for pool in pools if pool.get("enginePool")]:
        try:
            found[name] = await cluster.get(ENGINE_POOL, deployment["metadata"]["namespace"], stored)
        except ApiError as error:
            if error.status != 404:
                raise
    return found


async def _traffic(call: Call, deployment: Object, unavailable: dict[str, str]) -> Traffic | None:
    """What all routers count. A Service leads to any of several, and counters of another one are no traffic."""
    try:
        targets = await _routers(call.cluster, deployment) if _num_routers(deployment) > 1 else [_front(deployment)]
        within_s = call.gateway.program_wait_s
        texts = await asyncio.gather(*(metrics_of(call.cluster, target, within_s) for target in targets))
        return summed([traffic(text) for text in texts])
    except (ApiError, Problem, ValueError) as error:
        unavailable["traffic"] = str(error)
        return None


def _num_routers(deployment: Object) -> int:
    return ((deployment.get("status") or {}).get("router") or {}).get("replicas") or 0


def _front(deployment: Object) -> Target:
    """The Service in front of a deployment. Raises Problem 409 when it has none yet."""
    name, port = service_of(deployment)
    return Target("services", deployment["metadata"]["namespace"], name, port)


async def _routers(cluster: Cluster, deployment: Object) -> list[Target]:
    """The pods of the routers that run. Raises ValueError where there is none."""
    metadata = deployment["metadata"]
    own = {**ROUTERS, DEPLOYMENT_UID: metadata["uid"]}
    pods, _ = await list_all(cluster, POD, Selection(metadata["namespace"], labels=own))
    found = [
        Target("pods", metadata["namespace"], pod["metadata"]["name"], port)
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running" and (port := port_of(pod))
    ]
    if not found:
        raise ValueError("no router runs")
    return found


async def _loads(call: Call, pools: Iterable[Object], unavailable: dict[str, str]) -> dict[str, EngineLoad]:
    """What each ready engine measures, by the name of its pod."""
    ready = [
        (pool["metadata"]["namespace"], engine)
        for pool in pools
        for engine in (pool.get("status") or {}).get("engines") or ()
        if engine.get("ready") and engine.get("url")
    ]
    if len(ready) > MAX_ENGINES:
        unavailable["engines"] = f"the metrics of {MAX_ENGINES} of {len(ready)} engines are read"

    async def read(namespace: str, engine: Object) -> EngineLoad | None:
        try:
            target = Target("pods", namespace, engine["name"], engine_port(engine["url"]))
            return engine_load(await metrics_of(call.cluster, target, call.gateway.program_wait_s))
        except (ApiError, ValueError) as error:
            unavailable[engine["name"]] = str(error)
            return None

    chosen = ready[:MAX_ENGINES]
    found = await asyncio.gather(*(read(*one) for one in chosen))
    return {engine["name"]: load for (_, engine), load in zip(chosen, found, strict=True) if load is not None}


async def chat(
    deployment_id: ResourceId,
    call: Caller,
    wanted: Annotated[dict[str, Any], Body(description="OpenAI's body of /v1/chat/completions")],
    namespace: Namespace = None,
    api_key: Annotated[
        str | None, Header(alias="X-Api-Key", max_length=512, pattern=KEY, description="A key of the deployment")
    ] = None,
) -> Response:
    """Chat with the model of a deployment. The caller needs the right `services/proxy`."""
    found = await find(call, DEPLOYMENT, one_namespace(call, namespace), deployment_id)
    answer = await call.cluster.relay(
        _front(found), "POST", "/v1/chat/completions", json.dumps(wanted).encode(), api_key
    )
    if answer.status >= 300:
        text = (await start_of(answer, MAX_REFUSAL_BYTES)).decode(errors="replace")
        if answer.status == 401:
            raise Problem(403, "api-key", f"deployment {found['metadata']['name']}: {refusal_message(text)}")
        if answer.status == 503:
            detail = f"deployment {found['metadata']['name']}: {refusal_message(text)}"
            raise Problem(503, "not-ready", detail, headers={"Retry-After": "2"})
        raise ApiError(answer.status, "", f"deployment {found['metadata']['name']}: {refusal_message(text)}")
    media_type = answer.content_type.partition(";")[0] or "application/json"
    return ClosingStream(answer.chunks, answer.close, media_type=media_type, headers={"Cache-Control": "no-store"})


async def promote(
    deployment_id: ResourceId,
    call: Caller,
    answer: Response,
    wanted: PromoteRequest,
    namespace: Namespace = None,
    if_match: IfMatch = None,
) -> Deployment:
    """Serve a verified checkpoint, instead of the one, the selector or the address that the deployment names."""
    place = one_namespace(call, namespace)
    found = await find(call, DEPLOYMENT, place, deployment_id)
    checkpoint = await find(call, CHECKPOINT, place, wanted.checkpoint_id)
    if not usable(checkpoint):
        detail = f"{wanted.checkpoint_id!r} is {phase_of(checkpoint)} and not verified: only a verified one is served"
        raise wrong_field("checkpoint_id", detail)
    return await _serve(call, found, checkpoint["metadata"]["name"], if_match, answer)


async def roll_back(
    deployment_id: ResourceId,
    call: Caller,
    answer: Response,
    wanted: RollBackRequest | None = None,
    namespace: Namespace = None,
    if_match: IfMatch = None,
) -> Deployment:
    """Serve the checkpoint of an earlier revision again; everything else of the spec stays."""
    place = one_namespace(call, namespace)
    found = await find(call, DEPLOYMENT, place, deployment_id)
    revision = earlier_revision(found, (wanted or RollBackRequest()).revision)
    name = revision["checkpoint"]["name"]
    if why := await _why_not_served(call.cluster, place, name):
        raise Problem(409, "conflict", f"revision {revision['name']} served checkpoint {name}, which {why}")
    return await _serve(call, found, name, if_match, answer)


async def _why_not_served(cluster: Cluster, namespace: str, checkpoint: str) -> str:
    """Why a checkpoint cannot be served any more; empty when it can."""
    try:
        found = await cluster.get(CHECKPOINT, namespace, checkpoint)
    except ApiError as error:
        if error.status != 404:
            raise
        return "is gone"
    return "" if usable(found) else f"is {phase_of(found)} and not verified"


async def _serve(call: Call, deployment: Object, checkpoint: str, if_match: str | None, answer: Response) -> Deployment:
    model = {"checkpointRef": {"name": checkpoint}, "checkpointSelector": None, "uri": None, "uriSecretRef": None}
    found = await patch(call.cluster, DEPLOYMENT, deployment, {"spec": {"model": model}}, if_match)
    answer.headers["ETag"] = etag(found)
    return deployment_view(found)
