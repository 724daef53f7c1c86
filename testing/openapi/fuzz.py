"""Schemathesis against a program: requests from its OpenAPI document, valid and not, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

BASE = "http://program"


def labels(document: Mapping[str, Any]) -> list[str]:
    """`METHOD /path` of every operation."""
    return [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]


def fuzz(
    document: Mapping[str, Any], label: str, send: Callable[..., httpx.Response], *, examples: int = 10
) -> set[int]:
    """Ask one operation `examples` times with valid and as often with invalid requests; the status codes seen.

    Args:
        send: sends a request with the arguments of `httpx.Client.request`.
    """  # fmt: skip
    method, _, path = label.partition(" ")
    operation = schemathesis.openapi.from_dict(dict(document))[path][method]
    seen: set[int] = set()
    for mode in _modes(operation):

        @settings(
            max_examples=examples, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case[Any]) -> None:
            answer = send(**_arguments(case))
            seen.add(answer.status_code)
            case.validate_response(schemathesis.Response.from_httpx(answer, verify=True), checks=CHECKS)

        ask()
    return seen


def _modes(operation: Any) -> list[GenerationMode]:
    """Without a query and a body there is nothing to get wrong: any text is a name in a path."""
    inputs = [*operation.query, *operation.headers, *operation.body]
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if inputs else [])]


def _arguments(case: schemathesis.Case[Any]) -> dict[str, Any]:
    """The arguments of an HTTP client for a drawn request."""
    given = case.as_transport_kwargs(base_url=BASE)
    given["url"] = given["url"].removeprefix(BASE)
    given["headers"] = {name: str(value).strip() for name, value in (given.get("headers") or {}).items()}
    names = {
        "method": "method",
        "url": "url",
        "headers": "headers",
        "params": "params",
        "json": "json",
        "data": "content",
    }
    return {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
