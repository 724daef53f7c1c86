"""Defaults of a structural schema, as the API server fills them in, also inside of members that a default made.

Called by `admission` before an object is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def with_defaults(value: Any, schema: Schema) -> Any:
    """Copy `value` and give absent members their defaults; a null counts as absent."""
    if isinstance(value, dict):
        return _object(value, schema)
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    return value


def _object(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    members: Mapping[str, Schema] = schema.get("properties", {})
    others = schema.get("additionalProperties")
    found = {}
    for name, member in value.items():
        known = members.get(name, others)
        if known is None:
            found[name] = copy.deepcopy(member)
        elif member is not None:
            found[name] = with_defaults(member, known)
    for name, known in members.items():
        if name not in found and "default" in known:
            found[name] = with_defaults(copy.deepcopy(known["default"]), known)
    return found
