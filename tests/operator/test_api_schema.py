"""The CRD schema from pydantic types; a type without an equivalent is refused with its place."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from stoker.operator.api.schema import NotStructural, status_schema, structural_schema
from stoker.operator.api.value import Value, described_elsewhere, list_map, measured


class Inner(Value):
    """Inside."""

    size: int = 3
    """How big."""


class Plain(Value):
    name: str


class Sample(Value):
    optional: int | None = None
    inner: Inner = Inner()
    """Of this field."""
    again: Inner | None = None
    constant: Literal["x"] = "x"
    items: Annotated[tuple[Inner, ...], Field(max_length=2)] = ()
    either: Annotated[int, Field(ge=1)] | Annotated[str, Field(max_length=4)] = 1
    big: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    open: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
    by_name: Annotated[dict[str, str], Field(max_length=5)] | None = None
    plain: Plain | None = None


class Told(Value):
    first: Inner
    again: Annotated[Inner | None, Field(json_schema_extra=described_elsewhere())] = None
    """As `first`."""
    listed: Annotated[
        tuple[Inner, ...], Field(max_length=2, json_schema_extra={**list_map("size"), **described_elsewhere()})
    ] = ()


EXPECTED = {
    "optional": {"type": "integer"},
    "inner": {
        "type": "object",
        "description": "Of this field.",
        "default": {},
        "properties": {"size": {"type": "integer", "default": 3, "description": "How big."}},
    },
    "again": {"type": "object", "properties": {"size": {"type": "integer", "default": 3}}},
    "constant": {"type": "string", "enum": ["x"], "default": "x"},
    "items": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "object", "properties": {"size": {"type": "integer", "default": 3}}},
    },
    "either": {"x-kubernetes-int-or-string": True, "minimum": 1, "maxLength": 4, "default": 1},
    "big": {"type": "integer", "minimum": 0, "default": 0},
    "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "byName": {"type": "object", "maxProperties": 5, "additionalProperties": {"type": "string"}},
    "plain": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_form_has_its_structural_schema(name: str) -> None:
    assert structural_schema(Sample)["properties"][name] == EXPECTED[name]


def test_only_fields_without_a_default_are_required() -> None:
    assert structural_schema(Sample)["required"] == ["open"]


def test_a_status_loses_defaults_rules_and_limits_but_keeps_numbers_of_items_and_list_keys() -> None:
    schema = {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "string", "maxLength": 3, "pattern": "x", "default": "x"},
    }
    inner = {"type": "array", "maxItems": 3, "items": {"type": "string"}}
    whole = {"type": "object", "properties": {"names": schema}, "required": ["names"]}
    assert status_schema(whole) == {
        "type": "object",
        "properties": {"names": inner},
        "x-kubernetes-map-type": "atomic",
    }, "one owner of the whole"
    keyed = {
        "type": "array",
        "x-kubernetes-list-map-keys": ["id"],
        "items": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id", "name"]},
    }
    found = status_schema({"type": "object", "properties": {"listed": keyed}})
    assert found["properties"]["listed"]["items"]["required"] == ["id"]


def test_members_that_another_field_explains_are_preserved_and_not_described() -> None:
    found = structural_schema(Told)["properties"]
    assert found["again"] == {
        "type": "object",
        "description": "As `first`.",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    assert found["listed"]["items"] == {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {"size": {"type": "integer", "default": 3}},
        "required": ["size"],
    }
    assert found["first"]["properties"]["size"]["description"] == "How big."


class TwoTypes(BaseModel):
    value: int | bool


class Pair(BaseModel):
    pair: tuple[int, str]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TwoTypes, "TwoTypes.value: a union of 2 types has no structural schema"),
        (Pair, "Pair.pair: a tuple of mixed items has no structural schema"),
    ],
)
def test_what_a_crd_cannot_say_is_refused(model: type[BaseModel], message: str) -> None:
    with pytest.raises(NotStructural, match=message):
        structural_schema(model)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (2.0, "2"),
        (3.14159265, "3.14159"),
        (0.0003, "0.0003"),
        (1e-9, "1e-09"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_measured_float_is_text_with_six_digits(value: float | None, shown: str | None) -> None:
    assert measured(value) == shown
