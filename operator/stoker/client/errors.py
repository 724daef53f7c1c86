"""Errors of the client: the gateway's problem documents, and a gateway that does not answer."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from stoker.gateway.models import Job
from stoker.gateway.problem import FieldProblem, ProblemDocument


class StokerError(Exception):
    """The gateway refused a request; `problem` has the reason, and each wrong field in `problem.errors`."""

    def __init__(self, problem: ProblemDocument) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status

    @property
    def fields(self) -> list[FieldProblem]:
        """The wrong fields of the request."""
        return self.problem.errors


class NotAuthenticated(StokerError):
    """401: the token is not accepted, or has expired."""


class Forbidden(StokerError):
    """403: the caller may not do this."""


class NotFound(StokerError):
    """404: there is no such job, checkpoint or deployment."""


class Conflict(StokerError):
    """409 or 412: the state of the resource, or an idempotency key that is taken, does not allow it."""


class InvalidRequest(StokerError):
    """400 or 422: fields are wrong; `fields` names them."""


class TooManyRequests(StokerError):
    """429, after every retry."""


class GatewayFailed(StokerError):
    """5xx: the gateway or the cluster failed."""


ERRORS: dict[int, type[StokerError]] = {
    400: InvalidRequest,
    401: NotAuthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    422: InvalidRequest,
    429: TooManyRequests,
}


class JobFailed(Exception):
    """A job that was waited for ended as FAILED or CANCELLED; `job` is how it ended."""

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


class NoAnswer(Exception):
    """The gateway does not answer, or something else does in its place."""


def invalid_request(error: ValidationError) -> InvalidRequest:
    """The refusal of a request that is wrong before it is sent, as the gateway would word it."""
    fields = [FieldProblem(field=".".join(map(str, one["loc"])), message=one["msg"]) for one in error.errors()]
    detail = "; ".join(f"{one.field}: {one.message}" for one in fields)
    return InvalidRequest(
        ProblemDocument(
            type="urn:stoker:problem:invalid",
            title="Unprocessable Entity",
            status=422,
            detail=detail,
            instance="",
            errors=fields,
        )
    )


def check_answer(answer: httpx.Response) -> None:
    """Raise StokerError for a refusal, NoAnswer for an answer that leads elsewhere; its body was read if refused."""
    if answer.status_code >= 400:
        raise error_of(answer)
    if answer.status_code >= 300:
        raise foreign(answer)


def check_events(answer: httpx.Response) -> None:
    """Raise as `check_answer`, and NoAnswer for an answer that is no stream of events."""
    check_answer(answer)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise foreign(answer)


def foreign(answer: httpx.Response) -> NoAnswer:
    """The error of an answer that is not the gateway's."""
    where = answer.headers.get("location") or answer.headers.get("content-type") or "no type"
    place = answer.request.url.copy_with(path="/", query=None)
    return NoAnswer(f"{place}: the answer ({answer.status_code}, {where}) is not a gateway's")


def error_of(answer: httpx.Response) -> StokerError:
    """The error of an answer with a status of 400 or more."""
    try:
        problem = ProblemDocument.model_validate_json(answer.content)
    except ValidationError:
        detail = answer.text[:500] or answer.reason_phrase
        problem = ProblemDocument(
            type="about:blank", title=answer.reason_phrase, status=answer.status_code, detail=detail, instance=""
        )
    return error_of_problem(problem)


def error_of_problem(problem: ProblemDocument) -> StokerError:
    """The error of a problem document."""
    kind = GatewayFailed if problem.status >= 500 else ERRORS.get(problem.status, StokerError)
    return kind(problem)
