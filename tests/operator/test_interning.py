"""Interning: equal parts of many objects are one in memory, and keep their values."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.loop.interning import Interner

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-1, 1) | st.sampled_from(["", "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(PLAIN, max_size=30), st.integers(1, 20))
def test_what_comes_out_says_what_went_in_however_little_is_remembered(values: list[Any], entries: int) -> None:
    interner = Interner(entries)
    assert [json.dumps(interner.intern(value)) for value in values] == [json.dumps(value) for value in values]


def test_equal_parts_are_the_same_part() -> None:
    interner = Interner()
    first = interner.intern({"pod": {"volumes": [{"name": "tmp"}]}, "number": 1})
    second = interner.intern({"pod": {"volumes": [{"name": "tmp"}]}, "number": 2})
    assert first["pod"] is second["pod"]
    assert first["pod"]["volumes"][0] is second["pod"]["volumes"][0]
    assert (first["number"], second["number"]) == (1, 2)


def test_numbers_that_are_equal_and_not_the_same_stay_apart() -> None:
    interner = Interner()
    assert [json.dumps(interner.intern([value])) for value in (1, True, 1.0, 0, False)] == [
        "[1]",
        "[true]",
        "[1.0]",
        "[0]",
        "[false]",
    ]
