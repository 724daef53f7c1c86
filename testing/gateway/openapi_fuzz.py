"""Requests drawn from an OpenAPI document, and the check of an answer against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
from hypothesis import strategies as st

Schema = Mapping[str, Any]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    details: Schema

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Asked:
    """One drawn request."""

    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


def operations(document: Schema) -> Iterator[Operation]:
    """Every method of every path."""
    for path, methods in document["paths"].items():
        for method, details in methods.items():
            yield Operation(method.upper(), path, details)


def requests_of(document: Schema, operation: Operation, known: Mapping[str, list[str]]) -> st.SearchStrategy[Asked]:
    """Draw requests: mostly values that fit the document, some that do not; ids are often `known` ones.

    Args:
        known: parameter -> values that lead somewhere.
    """

    @st.composite
    def draw_request(draw: Any) -> Asked:
        path, query, headers = operation.path, {}, {}
        for parameter in operation.details.get("parameters") or ():
            name, place = parameter["name"], parameter["in"]
            if place != "path" and draw(st.integers(0, 2)) == 0:
                continue
            value = draw(_value(document, parameter["schema"], known.get(name, [])))
            if place == "path":
                path = path.replace(f"{{{name}}}", quote(str(value), safe=""))
            elif place == "query":
                query[name] = value if isinstance(value, list) else str(value)
            else:
                headers[name] = str(value)
        return Asked(path, query, _sendable(headers), draw(_body(document, operation)))

    return draw_request()


def _sendable(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that a client can send at all."""
    return {
        name: value
        for name, value in headers.items()
        if value.isascii() and value.isprintable() and value.strip() == value
    }


def _body(document: Schema, operation: Operation) -> st.SearchStrategy[Any]:
    content = (operation.details.get("requestBody") or {}).get("content") or {}
    if "application/json" not in content:
        return st.none()
    return _value(document, content["application/json"]["schema"], [])


def _value(document: Schema, schema: Schema, known: list[str]) -> st.SearchStrategy[Any]:
    fitting = strategy(document, schema)
    often = [st.sampled_from(known)] * 3 if known else [fitting] * 3
    return st.one_of(*often, fitting, ANYTHING)


def strategy(document: Schema, schema: Schema) -> st.SearchStrategy[Any]:
    """Values that fit a schema of the document."""
    schema = resolved(document, schema)
    if "anyOf" in schema:
        return st.one_of(*(strategy(document, one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            return _object(document, schema)
        case "array":
            return st.lists(strategy(document, schema["items"]), max_size=3)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "string":
            text = st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else st.text()
            return text.map(lambda value: value[: schema.get("maxLength", 100)])
        case "null":
            return st.none()
    return ANYTHING


def _object(document: Schema, schema: Schema) -> st.SearchStrategy[Any]:
    properties = {name: strategy(document, inner) for name, inner in (schema.get("properties") or {}).items()}
    needed = set(schema.get("required") or ())
    fixed = {name: value for name, value in properties.items() if name in needed}
    free = {name: value for name, value in properties.items() if name not in needed}
    if not properties and schema.get("additionalProperties") is not False:
        return st.dictionaries(st.text(max_size=10), ANYTHING, max_size=3)
    return st.fixed_dictionaries(fixed, optional=free)


def resolved(document: Schema, schema: Schema) -> Schema:
    """Follow a reference."""
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def check_answer(document: Schema, operation: Operation, answer: httpx.Response) -> None:
    """Assert that the document has this status, this media type and this body, and that nothing failed inside."""
    where = f"{operation}: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code < 500, where
    documented = operation.details["responses"].get(str(answer.status_code))
    assert documented is not None, f"not documented: {where}"
    if not answer.content:
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in documented["content"], f"not documented: {media_type}: {where}"
    schema = documented["content"][media_type].get("schema")
    if schema and media_type.endswith("json"):
        whole = {**schema, "components": document["components"]}
        jsonschema.Draft202012Validator(whole).validate(answer.json())
