"""Equal parts of many objects as one part in memory: a thousand jobs of one make have one pod template, not a thousand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

ENTRIES = 20_000
"""Parts in one of the two generations; one that is not asked for in the life of a generation is forgotten, not lost."""


class Interner:
    """Plain JSON data in, equal data out that shares what was seen before. Nobody may change what comes out."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self._young: dict[tuple[Any, ...], Any] = {}
        self._old: dict[tuple[Any, ...], Any] = {}

    def intern(self, value: Any) -> Any:
        """From the leaves up. A part is known by its own parts: these are shared already, so their addresses say which they are.

        What stands in a table holds its parts, so an address in a key is never given to anything else.
        """
        if isinstance(value, Mapping):
            made = {sys.intern(name): self.intern(inner) for name, inner in value.items()}
            return self._known((dict, *((name, _mark(inner)) for name, inner in made.items())), made)
        if isinstance(value, list | tuple):
            items = [self.intern(inner) for inner in value]
            return self._known((list, *map(_mark, items)), items)
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
    """What a part is known by: its address, or for a number its type and value, because 1, 1.0 and true are equal."""
    if isinstance(value, dict | list | str):
        return id(value)
    return type(value), value
