"""Refusal of fields that the schema does not have.

The API server drops them, or refuses them under strict field validation. Here they are refused, with the path.

Pure; called by `admission`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.admission.status_cause import StatusCause

Schema = Mapping[str, Any]


def unknown_fields(value: Any, schema: Schema, path: str = "") -> Iterator[StatusCause]:
    """Yield a cause for each member that is no property of the schema."""
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema["items"], f"{path}[{index}]")
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    members: Mapping[str, Schema] = schema.get("properties", {})
    for name, member in value.items():
        below = f"{path}.{name}" if path else name
        known = members.get(name, schema.get("additionalProperties"))
        if known is None:
            yield StatusCause(below, f'unknown field "{below}"{_meant(name, members)}', "FieldValueInvalid")
        else:
            yield from unknown_fields(member, known, below)


def _meant(name: str, members: Mapping[str, Schema]) -> str:
    close = difflib.get_close_matches(name, members, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
