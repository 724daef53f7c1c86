"""Errors as answers: the cluster's refusals, wrong requests and unknown paths become problem documents."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from stoker.gateway.cluster.interface import ApiError, Cause
from stoker.gateway.domain.sections import request_field
from stoker.gateway.problem import MEDIA_TYPE, FieldProblem, Problem, ProblemDocument

log = logging.getLogger("stoker.gateway")

_MEANING = {
    400: "the request is wrong, or the resource that it names is",
    401: "the bearer token is missing or unknown",
    403: "the caller lacks a right",
    404: "there is no such thing",
    405: "the path has no such method",
    406: "the answer has no such form",
    409: "the state of the resource does not allow it, or the name is taken",
    410: "the version or the page is too old: begin again",
    412: "the resource is not at the version of If-Match",
    413: "the body is too long",
    422: "a field is wrong; `errors` names each",
    429: "too many requests; Retry-After names the seconds to wait",
    502: "the cluster failed, or does not accept the gateway",
    503: "the cluster does not answer, or no engine of a deployment is ready; Retry-After names the seconds to wait",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}}
    for code, text in _MEANING.items()
}
"""The errors that every route may answer with."""
UNKNOWN = re.compile(r'unknown field "([^"]+)"')
"""The words of an API server about a field that its schema does not have; it names it in no cause."""
_OURS = {401: 502}
"""The cluster does not know the gateway's own account: no fault of the caller."""


def problem_of(error: ApiError, sections: Mapping[str, Mapping[str, Any]] | None = None) -> Problem:
    """The problem of a refusal; `sections` of the request name its fields as the caller wrote them."""
    if error.status == 0:
        return Problem(503, "cluster-unreachable", str(error), headers={"Retry-After": "2"})
    causes = error.causes or [Cause(field, "no such field") for field in UNKNOWN.findall(str(error))]
    errors = [FieldProblem(field=request_field(c.field, sections or {}), message=c.message) for c in causes if c.field]
    headers = {"Retry-After": error.retry_after} if error.retry_after else {}
    status = 502 if error.status >= 500 else 422 if errors else _OURS.get(error.status, error.status)
    status = status if status in ERRORS else 502
    return Problem(status, _name(status, error), str(error), errors=errors, headers=headers)


def _name(status: int, error: ApiError) -> str:
    names = {404: "not-found", 403: "forbidden", 410: "expired", 422: "invalid", 429: "too-many-requests"}
    if status == 409:
        return "exists" if error.reason == "AlreadyExists" else "conflict"
    return names.get(status, "cluster-failed" if status >= 500 else "refused")


def add_handlers(app: FastAPI) -> None:
    """Turn every error of the app into a problem document."""

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Problem)
        return answer(request, error)

    async def on_refusal(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return answer(request, problem_of(error))

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(request, _invalid(error))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return answer(request, _of_http(request, error))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(ApiError, on_refusal)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _of_http(request: Request, error: HTTPException) -> Problem:
    """The problem of an error that the framework raised, in words that say what to do."""
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        return Problem(
            405, "request", f"{request.method} is not allowed here; allowed are: {allowed}", headers={"Allow": allowed}
        )
    if error.status_code == 404:
        return Problem(404, "request", f"no route {request.url.path[:200]}; /openapi.json lists all")
    if error.status_code == 400:
        return Problem(400, "request", "the body is no JSON, nests too deeply, or has a number with too many digits")
    return Problem(error.status_code, "request", str(error.detail), headers=error.headers)


def _methods(request: Request) -> list[str]:
    """The methods of all routes of a path; the framework names those of the first."""

    def has(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.router.routes)

    return [method for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT") if has(method)]


def answer(request: Request, problem: Problem) -> JSONResponse:
    """The problem as an answer."""
    document = problem.document(request.url.path)
    if problem.status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, problem.detail)
    return JSONResponse(document.model_dump(), problem.status, problem.headers, MEDIA_TYPE)


def _invalid(error: RequestValidationError) -> Problem:
    """Name each wrong field of a request, with its value."""
    found = [_field(item) for item in error.errors()]
    detail = "; ".join(f"{one.field}: {one.message}" for one in found)
    return Problem(422, "invalid", detail[:4000], errors=found)


def _field(item: Mapping[str, Any]) -> FieldProblem:
    if item["type"] == "json_invalid":
        return FieldProblem(field="body", message=f"is no JSON: {item['ctx']['error']} at character {item['loc'][-1]}")
    if item["type"] in ("model_attributes_type", "model_type", "dict_type") and item["loc"] == ("body",):
        given = _as_text(item.get("input"))
        message = f"must be a JSON object, with the Content-Type application/json, got {given!r}"
        return FieldProblem(field="body", message=message)
    return FieldProblem(field=_place(item["loc"]), message=_message(item))


def _as_text(given: Any) -> str:
    return (given.decode(errors="replace") if isinstance(given, bytes) else str(given))[:200]


def _place(location: tuple[Any, ...]) -> str:
    """A field of the body by its path, another with the part of the request before it."""
    location = tuple(part for part in location if part != "[key]")
    parts = list(location[1:]) if location and location[0] == "body" else list(location)
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".") or "body"


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "missing":
        return "is needed"
    if item["type"] == "extra_forbidden":
        return "no such field"
    return f"{item['msg']}, got {str(item.get('input'))[:200]!r}"


def problem_schema() -> dict[str, Any]:
    """Schemas of the problem document, for the OpenAPI document."""
    return ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
