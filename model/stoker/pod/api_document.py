"""The OpenAPI document of a program of a pod: its probes, its control routes and what is its own.

Pure. The engine's routes for clients have a document of their own (`stoker.engine.http.api_document`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Schema = Mapping[str, Any]
OPENAPI_PATH = "/openapi.json"
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}


@dataclass(frozen=True)
class Answer:
    """One answer of a route."""

    description: str
    schema: Schema | None = None
    """None: an answer that is text."""
    media_type: str = "application/json"


@dataclass(frozen=True)
class Described:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answers: Mapping[int, Answer]
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    guarded: bool = False
    """Whether it needs a token that the operator signed."""


def plain(description: str) -> Answer:
    """An answer of text."""
    return Answer(description, None, "text/plain")


def refused(description: str) -> Answer:
    """An error of a program of a pod."""
    return Answer(description, ERROR)


def probes(status: Schema) -> tuple[Described, ...]:
    """The routes that every program serves; `status` is the schema of its `/status`."""
    return (
        Described("get", "/livez", "Whether the process is alive", {200: plain("Yes."), 503: plain("No.")}),
        Described("get", "/readyz", "Whether it takes work", {200: plain("Yes."), 503: plain("No.")}),
        Described(
            "get", "/status", "Phase and progress, as the operator polls them",
            {200: Answer("The status.", status), 401: refused("A token was sent that is not valid.")},
        ),
        Described("get", "/metrics", "Metrics for Prometheus", {200: plain("The metrics.")}),
    )  # fmt: skip


def control(method: str, path: str, summary: str, body: Schema, answer: Schema) -> Described:
    """A route that only the operator may call."""
    answers = {
        202: Answer("Accepted.", answer),
        400: refused("The body is wrong; the message names the field."),
        401: refused("The token is missing or not valid for this call."),
        413: refused("The body is too long."),
        503: refused("Too many bodies at one time."),
    }
    return Described(method, path, summary, answers, body, guarded=True)


def described(title: str, description: str, operations: Sequence[Described]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": description},
        "paths": paths,
        "components": {"securitySchemes": {"operator": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}},
    }


def document_route(document: Mapping[str, Any], path: str = OPENAPI_PATH) -> Route:
    """Serve a document."""

    async def serve(_: Request) -> JSONResponse:
        return JSONResponse(dict(document))

    return Route(path, serve)


def _operation(operation: Described) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {str(code): _answer(answer) for code, answer in operation.answers.items()},
    }
    if operation.query:
        found["parameters"] = [{"name": name, "in": "query", "schema": one} for name, one in operation.query.items()]
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    if operation.guarded:
        found["security"] = [{"operator": []}]
    return found


def _answer(answer: Answer) -> dict[str, Any]:
    schema = {"schema": answer.schema} if answer.schema is not None else {"schema": TEXT}
    return {"description": answer.description, "content": {answer.media_type: schema}}
