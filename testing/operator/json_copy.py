"""Copies of objects of the API, in a third of the time of `copy.deepcopy`."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any

LEAVES = frozenset({str, int, float, bool, NoneType})


def json_copy(value: Any) -> Any:
    """Copy dictionaries and lists. Texts and numbers are shared; anything that JSON has not is copied as ever."""
    kind = type(value)
    if kind is dict:
        return {name: member if type(member) in LEAVES else json_copy(member) for name, member in value.items()}
    if kind is list:
        return [member if type(member) in LEAVES else json_copy(member) for member in value]
    return value if kind in LEAVES else copy.deepcopy(value)
