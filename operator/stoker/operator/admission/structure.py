"""The structural schema as JSON Schema, checked by `jsonschema`, with the API server's messages.

Called by `admission` for each object, before the CEL rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError

from stoker.operator.admission.status_cause import StatusCause, status_cause

Schema = Mapping[str, Any]

_KEYWORDS = (
    "type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties",
)  # fmt: skip


_ASCII = "(?a)"
"""Go's `\\d` and `\\w` know ASCII only, and its `$` is the very end of the text."""


class Structure:
    """Checks values against one schema; compiled once."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._validator = Draft202012Validator(_json_schema(schema), format_checker=FormatChecker([]))

    def causes(self, value: Any) -> list[StatusCause]:
        """List what is wrong, in the order of the paths."""
        found = [_translated(error) for error in self._validator.iter_errors(value)]
        found += _duplicates(value, self._schema, "")
        return sorted(found, key=lambda one: one.field)


def _json_schema(schema: Schema) -> dict[str, Any]:
    """Return the part of the structural schema that JSON Schema can check."""
    found: dict[str, Any] = {key: schema[key] for key in _KEYWORDS if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if found.get("type") == "integer":
        found.setdefault("maximum", 2**63 - 1)
    if "pattern" in found:
        found["pattern"] = _ASCII + re.sub(r"\$$", r"\\Z", found["pattern"])
    if "properties" in schema:
        found["properties"] = {name: _json_schema(member) for name, member in schema["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            found[inner] = _json_schema(schema[inner])
    return found


def path_of(parts: Iterator[str | int] | list[str | int]) -> str:
    """Join the parts of a path: `spec.workers.env[0].name`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    """Format a value as the API server does: composite ones only by their type."""
    if isinstance(value, dict):
        return '"object"'
    if isinstance(value, list):
        return '"array"'
    return json.dumps(value, ensure_ascii=False)


def _type_name(value: Any) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        type(None): "null",
    }
    return names[type(value)]


def _wrong_type(path: str, value: Any, wanted: Any, allowed: Sequence[Any]) -> StatusCause:
    kind = "integer,string" if isinstance(wanted, list) else wanted
    detail = f'{path} in body must be of type {kind}: "{_type_name(value)}"'
    if "string" in kind and isinstance(value, int | float):
        detail += f' (a text is needed: write "{_text_of(value, allowed)}" with its quotes)'
    return status_cause(path, "FieldValueTypeInvalid", f'"{_type_name(value)}"', detail)


_YAML_WORDS = {False: {"off", "no", "n", "false"}, True: {"on", "yes", "y", "true"}}
"""What YAML 1.1 reads as a boolean."""


def _text_of(value: float, allowed: Sequence[Any]) -> str:
    """Return the text that was meant: `Off` without quotes is false to YAML."""
    if isinstance(value, bool):
        for one in allowed:
            if str(one).lower() in _YAML_WORDS[value]:
                return str(one)
    return json.dumps(value)


def _unsupported(path: str, value: Any, allowed: Any) -> StatusCause:
    values = ", ".join(json.dumps(one) for one in allowed)
    return status_cause(path, "FieldValueNotSupported", _shown(value), f"supported values: {values}")


def _invalid(text: str) -> Callable[[str, Any, Any], StatusCause]:
    """Return a translation whose detail is `PATH in body TEXT LIMIT`."""
    return lambda path, value, limit: status_cause(
        path, "FieldValueInvalid", _shown(value), f"{path} in body {text.format(limit)}"
    )


def _pattern(path: str, value: Any, pattern: str) -> StatusCause:
    shown = re.sub(r"\\Z$", "$", pattern.removeprefix(_ASCII))
    return status_cause(path, "FieldValueInvalid", _shown(value), f"{path} in body should match '{shown}'")


_MESSAGES: dict[str, Callable[[str, Any, Any], StatusCause]] = {
    "enum": _unsupported,
    "pattern": _pattern,
    "minimum": _invalid("should be greater than or equal to {}"),
    "maximum": _invalid("should be less than or equal to {}"),
    "minLength": _invalid("should be at least {} chars long"),
    "minItems": lambda path, value, limit: status_cause(
        path, "FieldValueInvalid", str(len(value)), f"{path} in body should have at least {limit} items"
    ),
    "minProperties": _invalid("should have at least {} properties"),
    "maxProperties": _invalid("should have at most {} properties"),
    "maxLength": lambda path, _, limit: status_cause(
        path, "FieldValueTooLong", "", f"may not be more than {limit} bytes"
    ),
    "maxItems": lambda path, value, limit: status_cause(
        path, "FieldValueTooMany", str(len(value)), f"must have at most {limit} items"
    ),
}


def _translated(error: ValidationError) -> StatusCause:
    path = path_of(list(error.absolute_path))
    if error.validator == "required":
        missing = next(
            str(name) for name in cast("list[str]", error.validator_value) if f"{name!r} is a required" in error.message
        )
        return status_cause(f"{path}.{missing}" if path else missing, "FieldValueRequired")
    if error.validator == "type":
        schema = cast("Schema", error.schema)
        return _wrong_type(path, error.instance, error.validator_value, schema.get("enum", ()))
    return _MESSAGES[str(error.validator)](path, error.instance, error.validator_value)


def _duplicates(value: Any, schema: Schema, path: str) -> list[StatusCause]:
    """Find items of a list map with the same keys, and equal items of a set."""
    found: list[StatusCause] = []
    if isinstance(value, dict):
        for name, member in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(known, Mapping):
                found += _duplicates(member, known, f"{path}.{name}" if path else name)
    if isinstance(value, list) and "items" in schema:
        found += _duplicates_of_list(value, schema, path)
        for index, item in enumerate(value):
            found += _duplicates(item, schema["items"], f"{path}[{index}]")
    return found


def _duplicates_of_list(value: list[Any], schema: Schema, path: str) -> list[StatusCause]:
    found, seen = [], set()
    for index, item in enumerate(value):
        identity = item_key(item, schema)
        if identity is not None and identity in seen:
            found.append(status_cause(f"{path}[{index}]", "FieldValueDuplicate", identity))
        seen.add(identity)
    return found


def item_key(item: Any, schema: Schema) -> str | None:
    """Return the identity of an item in a list map or a set; None for an atomic list."""
    form = schema.get("x-kubernetes-list-type")
    if form == "set":
        return json.dumps(item)
    if form == "map" and isinstance(item, dict):
        return json.dumps({key: item.get(key) for key in schema["x-kubernetes-list-map-keys"]}, separators=(",", ":"))
    return None
