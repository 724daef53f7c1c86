"""Interning of JSON data: equal parts of many objects are one part in memory.

A thousand jobs of one make have one pod template, not a thousand.

Owned by the store, which interns each object that it takes in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

ENTRIES = 2_000
"""Parts in one of the two generations. A part that is not met again during a generation is only forgotten.

An entry takes half a kilobyte, and most parts of an object are its own, so a large table costs more than it shares.
"""


class Interner:
    """A table of parts that were seen before. What it returns is shared and must never be changed."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self._young: dict[tuple[Any, ...], Any] = {}
        self._old: dict[tuple[Any, ...], Any] = {}

    def intern(self, value: Any) -> Any:
        """Return equal data that shares its parts with what was seen before.

        It works from the leaves up: parts of a part are interned already, so their addresses identify them. The table
        keeps each value and its parts alive, so an `id()` used in a key cannot be reused.
        """
        if isinstance(value, Mapping):
            made = {sys.intern(name): self.intern(inner) for name, inner in value.items()}
            return self._known((*made, *map(_mark, made.values())), made)
        if isinstance(value, list | tuple):
            items = [self.intern(inner) for inner in value]
            return self._known((None, *map(_mark, items)), items)
        return sys.intern(value) if isinstance(value, str) else value

    def _known(self, key: tuple[Any, ...], made: Any) -> Any:
        found = self._young.get(key)
        if found is not None:
            return found
        found = self._old.get(key, made)
        if len(self._young) >= self.entries:
            self._old, self._young = self._young, {}
        self._young[key] = found
        return found


def _mark(value: Any) -> Any:
    """The identity of a part: its address; for a number its type and value, because 1, 1.0 and true are equal."""
    if isinstance(value, dict | list | str):
        return id(value)
    return type(value), value
