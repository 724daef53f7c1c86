"""Objects of a JSON schema without the properties that it does not name. Pure.

By the standard, an object may have any further property. A small model that writes by such a schema often adds
properties until its tokens are used up, and generated schemas (pydantic's, for one) leave the keyword out. The schema
asks for further properties with `additionalProperties` or `patternProperties`.

Called for a request's schema before it becomes a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ONE = ("items", "additionalProperties", "contains")
_MANY = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
_COMPOSED = frozenset(
    {"allOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
"""Keywords by which several schemas apply to one object: none of them knows all of its properties."""
_OPEN = ("additionalProperties", "patternProperties")


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in each object that names properties and no others.

    A schema with a composed object anywhere is returned as it is.
    """
    return schema if is_composed(schema) else _closed(schema)


def is_composed(schema: Any) -> bool:
    """Whether several schemas apply to one object anywhere in it."""
    if not isinstance(schema, Mapping):
        return False
    exclusive = "oneOf" in schema and "discriminator" not in schema  # closing could make two branches one
    return exclusive or bool(_COMPOSED & {*schema}) or any(map(is_composed, _parts(schema)))


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    parts = [schema[word] for word in _ONE if word in schema]
    for word in (*_MANY, "items"):
        parts += schema[word] if isinstance(schema.get(word), list) else []
    for word in _NAMED:
        parts += schema[word].values() if isinstance(schema.get(word), Mapping) else []
    return parts


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    done = dict(schema)
    for word in (*_ONE, *_MANY):
        if word in done:
            done[word] = _closed(done[word])
    for word in _NAMED:
        if isinstance(done.get(word), Mapping):
            done[word] = {name: _closed(part) for name, part in done[word].items()}
    if isinstance(done.get("properties"), Mapping) and not any(word in done for word in _OPEN):
        done["additionalProperties"] = False
    return done
