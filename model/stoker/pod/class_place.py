"""The header by which a router tells an engine the class of a request. Values only.

Classes are numbered in the order of `router.classes`: 0 is served first.
"""

from __future__ import annotations

PLACE_HEADER = b"x-stoker-class-place"
"""The number of the request's class. Only a router sets it: routers drop a client's."""
MAX_CLASSES = 8
"""Places are below it."""


def place_in(value: bytes) -> int:
    """Read the header's value; an absent one (empty) is the first class.

    Raises:
        ValueError: it is no place, with what is allowed.
    """
    if not value:
        return 0
    if len(value) > 1 or not value.isdigit() or int(value) >= MAX_CLASSES:
        name, shown = PLACE_HEADER.decode(), value[:64].decode("latin-1")
        raise ValueError(f"header {name}: a class's number from 0 to {MAX_CLASSES - 1} is allowed, got {shown!r}")
    return int(value)
