"""Checkpoints: save now, those of a job, all of a namespace."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from stoker.gateway.cluster.interface import CHECKPOINT, JOB, ApiError, Object, Selection, list_all
from stoker.gateway.domain.checkpoint_pages import MAX_PLACE, PLACE, behind, place_of
from stoker.gateway.domain.names import MAX_CHECKPOINT_NAME, keyed_name
from stoker.gateway.domain.repeated import DIGEST, request_digest
from stoker.gateway.domain.resumption import of_job
from stoker.gateway.domain.states import ENDED, checkpoint_state, job_state
from stoker.gateway.domain.views import checkpoint_view
from stoker.gateway.http.caller import (
    Call,
    Caller,
    Continue,
    IdempotencyKey,
    Limit,
    Namespace,
    Namespaces,
    ResourceId,
    find,
    namespaces,
    one_namespace,
)
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.jobs import reused_with
from stoker.gateway.http.resource_views import EVENTS, PageQuery, Streamed, listed, shown
from stoker.gateway.http.versions import IfNoneMatch
from stoker.gateway.models import Checkpoint, CheckpointAnswer, CheckpointList, CheckpointRequest
from stoker.gateway.problem import Problem


def checkpoint_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(tags=["checkpoints"], responses=ERRORS)
    of_a_job = "/v1/training/jobs/{job_id}"
    router.add_api_route(
        f"{of_a_job}/checkpoint", save, methods=["POST"], status_code=202, response_model=CheckpointAnswer
    )
    router.add_api_route(f"{of_a_job}/checkpoints", list_of_job, methods=["GET"], response_model=list[Checkpoint])
    router.add_api_route(
        "/v1/checkpoints", list_checkpoints, methods=["GET"], response_model=CheckpointList, responses={200: EVENTS}
    )
    router.add_api_route(
        "/v1/checkpoints/{checkpoint_id}", read, methods=["GET"], response_model=Checkpoint,
        responses={304: {"description": "Unchanged"}},
    )  # fmt: skip
    return router


async def save(
    job_id: ResourceId,
    call: Caller,
    answer: Response,
    wanted: CheckpointRequest | None = None,
    namespace: Namespace = None,
    idempotency_key: IdempotencyKey = None,
) -> CheckpointAnswer:
    """Save now. The answer names the checkpoint, which is SAVING until the job has written and verified it."""
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    body = _save(call, job, (wanted or CheckpointRequest()).pinned, idempotency_key)
    if job_state(job) in ENDED:
        found = await _repeated(call, body) if idempotency_key else None
        if found is None:
            detail = f"job {job['metadata']['name']} is {job_state(job)}: it cannot save any more"
            raise Problem(409, "conflict", detail)
    else:
        found = await _ask_for_save(call, body, repeatable=idempotency_key is not None)
    metadata = found["metadata"]
    answer.headers["Location"] = f"/v1/checkpoints/{metadata['uid']}?namespace={metadata['namespace']}"
    return CheckpointAnswer(
        checkpoint_id=metadata["uid"], checkpoint_name=metadata["name"], status=checkpoint_state(found)
    )


def _save(call: Call, job: Object, pinned: bool, key: str | None) -> Object:
    """The Checkpoint of a request."""
    metadata = job["metadata"]
    token = call.gateway.new_id() if key is None else f"{call.caller.name}\0{key}"
    name = keyed_name(metadata["name"], metadata["uid"], token, longest=MAX_CHECKPOINT_NAME, suffix="-save")
    digest = request_digest({"pinned": pinned})
    source = {"jobRef": {"name": metadata["name"], "uid": metadata["uid"]}}
    return {
        "apiVersion": CHECKPOINT.api_version,
        "kind": CHECKPOINT.name,
        "metadata": {"name": name, "namespace": metadata["namespace"], "annotations": {DIGEST: digest}},
        "spec": {"source": source, "pinned": pinned},
    }


async def _ask_for_save(call: Call, body: Object, *, repeatable: bool) -> Object:
    try:
        return await call.cluster.create(CHECKPOINT, body["metadata"]["namespace"], body)
    except ApiError as error:
        found = await _repeated(call, body) if repeatable and error.reason == "AlreadyExists" else None
        if found is None:
            raise
        return found


async def _repeated(call: Call, body: Object) -> Object | None:
    """The Checkpoint of an earlier request with the same key. Raises Problem 422 when that asked for something else."""
    metadata, digest = body["metadata"], body["metadata"]["annotations"][DIGEST]
    try:
        found = await call.cluster.get(CHECKPOINT, metadata["namespace"], metadata["name"])
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    if (found["metadata"].get("annotations") or {}).get(DIGEST, digest) != digest:
        pinned = bool(body["spec"]["pinned"])
        raise reused_with(found, "pinned", not pinned, pinned)
    return found


async def list_of_job(
    request: Request,
    job_id: ResourceId,
    call: Caller,
    answer: Response,
    namespace: Namespace = None,
    limit: Limit = 100,
    after: Annotated[str, Query(alias="continue", max_length=MAX_PLACE, pattern=PLACE)] = "",
) -> list[Checkpoint]:
    """List the checkpoints of a job, newest first. Of the headers `Link` leads on, `X-Total-Count` counts all.

    A page begins behind the last checkpoint of the page before: one that is saved meanwhile moves none into two pages.
    """
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    own = of_job((await list_all(call.cluster, CHECKPOINT, Selection(job["metadata"]["namespace"])))[0], job)
    answer.headers["X-Total-Count"] = str(len(own))
    left = behind(own, after)
    page = left[:limit]
    if len(left) > limit:
        following = request.url.include_query_params(**{"continue": place_of(page[-1])})
        answer.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    return [checkpoint_view(one) for one in page]


async def list_checkpoints(
    request: Request,
    call: Caller,
    stream: Streamed,
    namespace: Namespaces = None,
    limit: Limit = 100,
    after: Continue = "",
) -> Any:
    """List checkpoints, or watch them."""
    selection, query = Selection(namespaces(call, namespace)), PageQuery(limit, after)
    return await listed(request, call, CHECKPOINT, selection, query, stream, checkpoint_view, CheckpointList)


async def read(
    checkpoint_id: ResourceId,
    call: Caller,
    answer: Response,
    namespace: Namespace = None,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Read one checkpoint."""
    found = await find(call, CHECKPOINT, one_namespace(call, namespace), checkpoint_id)
    return shown(found, answer, if_none_match, checkpoint_view)
