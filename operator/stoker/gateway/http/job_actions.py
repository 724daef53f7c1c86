"""Actions on a job: cancel or delete, suspend, resume."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from stoker.gateway.cluster.interface import CHECKPOINT, JOB, ApiError, Object, Selection, list_all
from stoker.gateway.domain.names import continued_name, is_uid
from stoker.gateway.domain.repeated import (
    DIGEST,
    RESUME_VALUES,
    RESUMED,
    changed_resume,
    difference,
    is_repeated_resume,
    request_digest,
    resume_values,
)
from stoker.gateway.domain.resumption import (
    continued_spec,
    newest_verified,
    of_job,
    refuse_suspended,
    usable,
    usable_names,
)
from stoker.gateway.domain.states import ENDED, JobState, job_state, phase_of
from stoker.gateway.domain.views import job_answer
from stoker.gateway.http.caller import Call, Caller, IdempotencyKey, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.jobs import reused_key, reused_with
from stoker.gateway.http.versions import IfMatch, check_match, delete, etag, patch
from stoker.gateway.models import Cancelled, JobAnswer, ResumeRequest
from stoker.gateway.problem import Problem, wrong_field


def job_action_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/training/jobs/{job_id}", tags=["training"], responses=ERRORS)
    router.add_api_route("", cancel, methods=["DELETE"], response_model=Cancelled)
    router.add_api_route("/suspend", suspend, methods=["POST"], status_code=202, response_model=JobAnswer)
    router.add_api_route("/resume", resume, methods=["POST"], status_code=202, response_model=JobAnswer)
    return router


async def cancel(
    job_id: ResourceId,
    call: Caller,
    namespace: Namespace = None,
    purge: Annotated[bool, Query(description="Delete the TrainingJob itself; its checkpoints stay")] = False,
    if_match: IfMatch = None,
) -> Cancelled:
    """Cancel a job: it saves, then ends for good. With `purge` its resource is deleted, whatever its state."""
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    if purge:
        await delete(call.cluster, JOB, job, if_match)
        return Cancelled(status="DELETED")
    if job_state(job) in ENDED - {JobState.CANCELLED}:
        raise _conflict(job, "it cannot be cancelled; ?purge=true deletes it")
    if not _is_asked_to(job, "cancel"):
        await patch(call.cluster, JOB, job, {"spec": {"run": {"cancel": True}}}, if_match)
    else:
        check_match(if_match, job)
    return Cancelled(status="CANCELLED")


async def suspend(
    job_id: ResourceId, call: Caller, answer: Response, namespace: Namespace = None, if_match: IfMatch = None
) -> JobAnswer:
    """Suspend a job: it saves and gives its nodes back, until it is resumed."""
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    _check_goes_on(job)
    found = await patch(call.cluster, JOB, job, {"spec": {"run": {"suspend": True}}}, if_match)
    answer.headers["ETag"] = etag(found)
    return job_answer(found)


async def resume(
    job_id: ResourceId,
    call: Caller,
    answer: Response,
    wanted: ResumeRequest | None = None,
    namespace: Namespace = None,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> JobAnswer:
    """Resume a job. A suspended one goes on; of a finished one a new job begins at the checkpoint."""
    wanted = wanted or ResumeRequest()
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    note = _note(call, wanted, idempotency_key)
    found = _went_on(job, note, wanted) or await _resumed(call, job, wanted, if_match, idempotency_key, note)
    metadata = found["metadata"]
    answer.headers["Location"] = f"/v1/training/jobs/{metadata['uid']}?namespace={metadata['namespace']}"
    answer.headers["ETag"] = etag(found)
    return job_answer(found)


def _note(call: Call, wanted: ResumeRequest, key: str | None) -> str:
    """What a job that goes on remembers of the request: digests of its key and of its values; empty without a key."""
    return f"{request_digest([call.caller.name, key])}.{request_digest(wanted.model_dump())}" if key else ""


def _went_on(job: Object, note: str, wanted: ResumeRequest) -> Object | None:
    """The job where it went on for this very request before. Raises Problem 422 when that asked for something else."""
    repeats = is_repeated_resume(job, note) if note else False
    if repeats is None:
        raise _reused_key(job, wanted)
    return job if repeats else None


def _reused_key(job: Object, wanted: ResumeRequest) -> Problem:
    """The refusal of a key whose first resume asked for something else, with the field and both of its values."""
    changed = changed_resume(wanted.model_dump(), job)
    if changed is None:
        return reused_key(job, "body")
    return reused_with(job, *changed)


async def _resumed(
    call: Call, job: Object, wanted: ResumeRequest, if_match: str | None, key: str | None, note: str
) -> Object:
    """The job that goes on, or the new one that begins. Raises Problem 409 and 422."""
    if job_state(job) not in ENDED and not _is_asked_to(job, "suspend"):
        raise _conflict(job, "only a suspended or finished job can be resumed")
    _check_not_cancelled(job)
    own = of_job((await list_all(call.cluster, CHECKPOINT, Selection(job["metadata"]["namespace"])))[0], job)
    chosen = _chosen(own, wanted.checkpoint_id)
    if job_state(job) not in ENDED:
        _check_goes_on_at(job, own, chosen, wanted)
        values = {RESUMED: note, RESUME_VALUES: resume_values(wanted.model_dump())}
        noted = {"metadata": {"annotations": values}} if note else {}
        return await patch(call.cluster, JOB, job, {"spec": {"run": {"suspend": False}}, **noted}, if_match)
    check_match(if_match, job)
    return await _begin_anew(call, job, chosen or newest_verified(own), wanted, key)


def _check_goes_on_at(job: Object, own: list[Object], chosen: Object | None, wanted: ResumeRequest) -> None:
    """Refuse what a suspended job cannot do. Raises Problem 409 and 422."""
    if wanted.total_steps is not None:
        raise wrong_field("total_steps", "the length of a suspended job is fixed: leave it out")
    if chosen is not None:
        refuse_suspended(job, chosen, newest_verified(own))


async def _begin_anew(
    call: Call, job: Object, checkpoint: Object | None, wanted: ResumeRequest, key: str | None
) -> Object:
    if checkpoint is None:
        raise _conflict(job, "it has no verified checkpoint to go on from")
    namespace = job["metadata"]["namespace"]
    token = call.gateway.new_id() if key is None else f"{call.caller.name}\0{key}"
    name = continued_name(job["metadata"]["name"], job["metadata"]["uid"], token)
    noted = {DIGEST: request_digest(wanted.model_dump()), RESUME_VALUES: resume_values(wanted.model_dump())}
    spec = continued_spec(job, checkpoint, wanted.total_steps)
    body = {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": noted,
        },
        "spec": spec,
    }
    try:
        return await call.cluster.create(JOB, namespace, body)
    except ApiError as error:
        if key is None or error.reason != "AlreadyExists":
            raise
        found = await call.cluster.get(JOB, namespace, name)
        if difference(body, found):
            raise _reused_key(found, wanted) from error
        return found


def _chosen(own: list[Object], wanted: str | None) -> Object | None:
    """The checkpoint that the request names. Raises Problem 422."""
    if wanted is None:
        return None
    field = "uid" if is_uid(wanted) else "name"
    found = next((one for one in own if one["metadata"][field] == wanted), None)
    if found is None:
        raise wrong_field("checkpoint_id", f"{wanted!r} is no checkpoint of this job; {usable_names(own)}")
    if not usable(found):
        raise wrong_field(
            "checkpoint_id",
            f"{wanted!r} is {phase_of(found)} and not verified, so no job can begin at it; {usable_names(own)}",
        )
    return found


def _check_goes_on(job: Object) -> None:
    if job_state(job) in ENDED:
        raise _conflict(job, "only a job that goes on can be suspended")
    _check_not_cancelled(job)


def _check_not_cancelled(job: Object) -> None:
    if job_state(job) not in ENDED and _is_asked_to(job, "cancel"):
        raise _conflict(job, "it is being cancelled, and that is for good; once it has, a new job may go on from it")


def _is_asked_to(job: Object, what: str) -> bool:
    return bool((job["spec"].get("run") or {}).get(what))


def _conflict(job: Object, why: str) -> Problem:
    return Problem(409, "conflict", f"job {job['metadata']['name']} is {job_state(job)}: {why}")
