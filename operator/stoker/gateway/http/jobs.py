"""Training jobs: submit, list, watch, read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from stoker.gateway.cluster.interface import JOB, ApiError, Object, Selection
from stoker.gateway.domain.names import MAX_JOB_NAME, keyed_name
from stoker.gateway.domain.repeated import DIGEST, difference, request_digest
from stoker.gateway.domain.sections import to_spec
from stoker.gateway.domain.states import JobState, job_state
from stoker.gateway.domain.views import job_answer, job_view
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
from stoker.gateway.http.errors import ERRORS, problem_of
from stoker.gateway.http.resource_views import (
    EVENTS,
    PageQuery,
    Streamed,
    listed,
    shown,
    watched_one,
)
from stoker.gateway.http.versions import IfNoneMatch, etag
from stoker.gateway.models import Job, JobAnswer, JobList, NewJob
from stoker.gateway.problem import FieldProblem, Problem


def job_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/training/jobs", tags=["training"], responses=ERRORS)
    router.add_api_route("", submit, methods=["POST"], status_code=201, response_model=JobAnswer)
    router.add_api_route("", list_jobs, methods=["GET"], response_model=JobList, responses={200: EVENTS})
    router.add_api_route(
        "/{job_id}",
        read,
        methods=["GET"],
        response_model=Job,
        responses={200: EVENTS, 304: {"description": "Unchanged"}},
    )
    return router


async def submit(
    new: NewJob, call: Caller, answer: Response, namespace: Namespace = None, idempotency_key: IdempotencyKey = None
) -> JobAnswer:
    """Submit a training job.

    With an `Idempotency-Key` the resource is named `job_name-DIGITS`; a repeated request answers with the first job.
    """
    place = one_namespace(call, namespace)
    body = _manifest(new, place, call.caller.name, idempotency_key)
    try:
        found = await call.cluster.create(JOB, place, body)
    except ApiError as error:
        if idempotency_key is None or error.reason != "AlreadyExists":
            raise problem_of(error, _sections(new)) from error
        found = await repeated(call, body)
    answer.headers["Location"] = f"/v1/training/jobs/{found['metadata']['uid']}?namespace={place}"
    answer.headers["ETag"] = etag(found)
    return job_answer(found)


async def list_jobs(
    request: Request,
    call: Caller,
    stream: Streamed,
    namespace: Namespaces = None,
    status: Annotated[list[JobState] | None, Query(description="Only these states; a page may then hold fewer")] = None,
    limit: Limit = 100,
    after: Continue = "",
) -> Any:
    """List training jobs, or watch them."""
    selection, query = Selection(namespaces(call, namespace)), PageQuery(limit, after)

    def shows(job: Object) -> bool:
        return status is None or job_state(job) in status

    return await listed(request, call, JOB, selection, query, stream, job_view, JobList, shows)


async def read(
    job_id: ResourceId,
    call: Caller,
    stream: Streamed,
    answer: Response,
    namespace: Namespace = None,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Read one job with its current metrics, or watch it."""
    found = await find(call, JOB, one_namespace(call, namespace), job_id)
    if stream.wanted:
        return await watched_one(call, JOB, found, stream.version, job_view)
    return shown(found, answer, if_none_match, job_view)


def _sections(new: NewJob) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = new.model_dump(
        by_alias=True, exclude_none=True, exclude={"job_name", "spec", "labels"}
    )
    return found


def _manifest(new: NewJob, namespace: str, caller: str, key: str | None) -> Object:
    """The TrainingJob of a request."""
    name = new.job_name if key is None else keyed_name(new.job_name, caller, key, longest=MAX_JOB_NAME)
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, **({"labels": new.labels} if new.labels else {})}
    if key is not None:
        metadata["annotations"] = {DIGEST: request_digest(new.model_dump(by_alias=True, exclude_unset=True))}
    spec = to_spec(_sections(new), new.spec)
    return {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata, "spec": spec}


async def repeated(call: Call, body: Object) -> Object:
    """The job of an earlier request with the same key. Raises Problem 422 when that asked for something else."""
    metadata = body["metadata"]
    found = await call.cluster.get(JOB, metadata["namespace"], metadata["name"])
    if other := difference(body, found):
        raise reused_key(found, other)
    return found


def reused_key(found: Object, other: str) -> Problem:
    """The refusal of a key whose first request made `found`, with another value of `other`."""
    detail = f"Idempotency-Key: used before with another {other} ({found['metadata']['name']}): take a new key"
    return Problem(422, "idempotency-key-reused", detail)


def reused_with(found: Object, field: str, before: object, now: object) -> Problem:
    """The refusal of a key whose first request made or changed `found`, with another value of a field of its body."""
    had, allowed = ("none", "leave it out") if before is None else (repr(before), f"give {before!r}")
    got = "none" if now is None else repr(now)
    first = f"the first request with this Idempotency-Key ({found['metadata']['name']}) had {had}"
    message = f"got {got}, but {first}: {allowed}, or take a new key"
    return Problem(
        422, "idempotency-key-reused", f"{field}: {message}", errors=[FieldProblem(field=field, message=message)]
    )
