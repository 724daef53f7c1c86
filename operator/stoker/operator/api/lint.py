"""Checks of a CRD's schema: the API server's demands, and limits everywhere, so that CEL rules can be priced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_FOREIGN = (
    "$ref",
    "$defs",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "title",
    "const",
    "propertyNames",
    "uniqueItems",
    "prefixItems",
    "nullable",
)
MAX_BYTES = 40_000
"""Size of a CRD, as file and as JSON: client-side apply keeps a copy in an annotation, and people read it."""
MAX_BYTES_OF = {"TrainingJob": 49_000, "InferenceDeployment": 49_000}
"""Kinds with more fields."""


def max_bytes(kind: str) -> int:
    """Return the largest size of the kind's CRD."""
    return MAX_BYTES_OF.get(kind, MAX_BYTES)


def problems(schema: Schema, path: str = "") -> Iterator[str]:
    """Yield one line per fault, with its path; `metadata` at the top is Kubernetes' own."""
    for key in _FOREIGN:
        if key in schema:
            yield f"{path}: {key} has no place in a structural schema"
    kind = schema.get("type")
    if kind is None and not schema.get("x-kubernetes-int-or-string"):
        yield f"{path}: type is missing"
    yield from _limits(schema, path)
    if kind == "array":
        yield from _list(schema, path)
    yield from _rules(schema, path)
    for name, member in schema.get("properties", {}).items():
        if path or name not in ("metadata", "apiVersion", "kind"):
            yield from problems(member, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            yield from problems(schema[inner], f"{path}[]")


def _limits(schema: Schema, path: str) -> Iterator[str]:
    text = schema.get("type") == "string" or schema.get("x-kubernetes-int-or-string")
    priced = not path.startswith(".status")  # rules are priced by lengths, and a status has no rules
    if text and priced and "enum" not in schema and "maxLength" not in schema:
        yield f"{path}: maxLength is missing"
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield f"{path}: maxItems is missing"
    if schema.get("type") == "number":
        yield f"{path}: no floats: use a decimal string"
    if "additionalProperties" in schema:
        if not isinstance(schema["additionalProperties"], dict):
            yield f"{path}: additionalProperties must be a schema"
        if "maxProperties" not in schema:
            yield f"{path}: maxProperties is missing"
        if "properties" in schema:
            yield f"{path}: properties and additionalProperties exclude each other"
    if any("exclusive" in key for key in schema):
        yield f"{path}: exclusive limits are written differently in OpenAPI 3.0"


def _list(schema: Schema, path: str) -> Iterator[str]:
    form = schema.get("x-kubernetes-list-type")
    if form not in ("map", "set", "atomic"):
        yield f"{path}: x-kubernetes-list-type is missing"
    for key in schema.get("x-kubernetes-list-map-keys", ()):
        item = schema["items"]
        if key not in item.get("required", ()) and "default" not in item["properties"].get(key, {}):
            yield f"{path}: list key {key} must be required or have a default"


def _rules(schema: Schema, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        said = rule.get("messageExpression") or rule.get("message") or ""
        if not said or "\n" in said:
            yield f"{path}: a rule needs a message of one line"
        if rule["rule"].count("(") != rule["rule"].count(")"):
            yield f"{path}: unbalanced rule {rule['rule']}"
        if (target := rule.get("fieldPath")) and not _has(schema, target):
            yield f"{path}: fieldPath {target} names no field"


def _has(schema: Schema, path: str) -> bool:
    for name in path.strip(".").split("."):
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return False
    return True
