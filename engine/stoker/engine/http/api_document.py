"""The OpenAPI document of an engine, made from the pydantic bodies of its requests, and a page that shows it.

Pure; made once by `server`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker.engine.http.openai.responses_body import ResponsesBody

OPENAPI_PATH = "/openapi.json"
DOCS_PATH = "/docs"
REQUESTS_PATH = "/v1/requests"
REF = "#/components/schemas/{model}"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    media_type: str = "application/json"
    needs_key: bool = True
    statuses: tuple[int, ...] = ()
    """Beside 200: errors in the shape of `Error`."""


REFUSALS = (400, 401, 404, 405, 408, 413, 414, 429, 431, 500, 503)
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatBody, statuses=REFUSALS),
    Operation("post", "/v1/completions", "Continue prompts", CompletionBody, statuses=REFUSALS),
    Operation("post", "/v1/responses", "Answer statelessly, in typed events", ResponsesBody, statuses=REFUSALS),
    Operation("get", "/v1/models", "List the served names", statuses=(401,)),
    Operation("get", "/v1/models/{model}", "Show one served name", statuses=(401, 404)),
    Operation("post", "/v1/models/{model}/load", "Load a model (--models-dir)", statuses=(401, 404, 409)),
    Operation("delete", "/v1/models/{model}", "Drain and unload a model (--models-dir)", statuses=(401, 404, 409)),
    Operation("get", "/v1/requests/{id}", "Show the life of a request of this engine", statuses=(401, 404, 503)),
    Operation("post", "/v1/embeddings", "Refused: this engine generates text", statuses=(400, 401)),
    Operation("post", "/tokenize", "Turn text or a conversation into token ids", TokenizeBody, statuses=REFUSALS),
    Operation("post", "/detokenize", "Turn token ids into text", DetokenizeBody, statuses=REFUSALS),
    Operation("get", "/health", "Whether requests are answered", needs_key=False, statuses=(503,)),
    Operation("get", "/ping", "The same as /health", needs_key=False, statuses=(503,)),
    Operation("get", "/version", "The version of Stoker", needs_key=False),
    Operation("get", "/status", "Phase, model and load of this engine", needs_key=False),
    Operation("get", "/metrics", "Metrics for Prometheus", media_type="text/plain", needs_key=False),
    Operation("get", "/livez", "Whether the process is alive", media_type="text/plain", needs_key=False),
    Operation("get", "/readyz", "Whether new requests are taken", media_type="text/plain", needs_key=False),
)


@cache
def openapi_document(version: str) -> Mapping[str, Any]:
    """The OpenAPI 3.1 document of every route that clients may use."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stoker engine", "version": version, "description": "An OpenAI-compatible server."},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": ERROR_SCHEMA},
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    """One operation of the document."""
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').translate(ID_CHARACTERS)}",
        "responses": {"200": _response("The answer.", operation), **{str(s): _error(s) for s in operation.statuses}},
    }
    if operation.body is not None:
        schema = {"$ref": REF.format(model=operation.body.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if names := PATH_NAME.findall(operation.path):
        made["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if operation.needs_key:
        made["security"] = [{}, {"apiKey": []}]
    return made


PATH_NAME = re.compile(r"\{(\w+)\}")
ID_CHARACTERS = str.maketrans({"/": "_", "{": None, "}": None})


def _response(description: str, operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {}}
    if operation.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content["text/event-stream"] = {}
    return {"description": description, "content": content}


def _error(status: int) -> dict[str, Any]:
    schema = {"$ref": REF.format(model="Error")}
    return {"description": f"Refused with {status}.", "content": {"application/json": {"schema": schema}}}


@cache
def docs_page() -> bytes:
    """An HTML page that shows the document; the browser loads Swagger UI from its usual place."""
    from fastapi.openapi.docs import get_swagger_ui_html  # takes 0.3 s to import, and few ask for the page

    return bytes(get_swagger_ui_html(openapi_url=OPENAPI_PATH, title="Stoker engine").body)
