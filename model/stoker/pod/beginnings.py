"""The header by which a router names the beginning of a prompt, so that an engine can tell when it is in the store.

The name means something to the router alone: engines repeat it in their load reports (`store.announced`). Values only.
"""

from __future__ import annotations

BEGINNING_HEADER = b"x-stoker-beginning"
"""1 to 16 hexadecimal digits. Only a router sets it: routers drop a client's."""
MOST_ANNOUNCED = 64
"""Names in one report, the newest ones."""
_DIGITS = frozenset(b"0123456789abcdef")


def beginning_in(value: bytes) -> str:
    """Read the header's value; empty for an absent one.

    Raises:
        ValueError: it is no name, with what is allowed.
    """
    if len(value) > 16 or not _DIGITS.issuperset(value):
        name, shown = BEGINNING_HEADER.decode(), value[:64].decode("latin-1")
        raise ValueError(f"header {name}: 1 to 16 hexadecimal digits are allowed, got {shown!r}")
    return value.decode()
