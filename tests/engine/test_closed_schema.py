"""Schemas whose objects have the properties that they name, and no others."""

from __future__ import annotations

from typing import Any

import jsonschema
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.closed_schema import closed

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
SHUT = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (True, True),
        ({"type": "object"}, {"type": "object"}),
        (A, SHUT),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": {}}}, {**A, "patternProperties": {"^x": {}}}),
        ({"properties": {"properties": A}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
        ({"items": A}, {"items": SHUT}),
        ({"items": [A]}, {"items": [SHUT]}),
        ({"prefixItems": [A]}, {"prefixItems": [SHUT]}),
        ({"anyOf": [A, True]}, {"anyOf": [SHUT, True]}),
        ({"additionalProperties": A}, {"additionalProperties": SHUT}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"enum": [A], "const": A, "default": A}, {"enum": [A], "const": A, "default": A}),
        ({"items": {"allOf": [A, {"properties": {"b": {}}}]}}, {"items": {"allOf": [A, {"properties": {"b": {}}}]}}),
        ({**A, "if": {}, "then": {}}, {**A, "if": {}, "then": {}}),
        ({"oneOf": [A, {"properties": {"b": {}}}]}, {"oneOf": [A, {"properties": {"b": {}}}]}),
        ({"oneOf": [A], "discriminator": {}}, {"oneOf": [SHUT], "discriminator": {}}),
    ],
)
def test_objects_are_closed_where_the_schema_says_nothing(given_: Any, expected: Any) -> None:
    assert closed(given_) == expected


class Inner(pydantic.BaseModel):
    x: int


class Outer(pydantic.BaseModel):
    first: Inner
    others: list[Inner] | None = None


def test_what_pydantic_generates_is_closed_at_every_level() -> None:
    schema = closed(Outer.model_json_schema())
    jsonschema.validate({"first": {"x": 1}, "others": [{"x": 2}]}, schema)
    for wrong in ({"first": {"x": 1}, "y": 1}, {"first": {"x": 1, "y": 1}}, {"first": {"x": 1}, "others": [{"y": 1}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


SCHEMAS = st.recursive(
    st.sampled_from([True, {"type": "integer"}, {"enum": ["a", 1]}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)}),
        st.fixed_dictionaries({"items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([1, "a", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_a_closed_schema_allows_nothing_that_the_open_one_refuses(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert closed(closed(schema)) == closed(schema)
