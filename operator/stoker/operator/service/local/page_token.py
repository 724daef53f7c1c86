"""Tokens of the pages of a list: `continue` of the embedded cluster's API. Pure.

A token names the list that it belongs to and the last object of the page, so that the next page begins behind it
whatever was made or deleted meanwhile. Another text, or the token of another list, is refused.
"""

from __future__ import annotations

import base64
import binascii

VERSION = "v1"


def token_of(listed: str, place: str) -> str:
    """The token behind `place` in the list named `listed`."""
    return base64.urlsafe_b64encode("\n".join((VERSION, listed, place)).encode()).decode()


def place_of(listed: str, token: str) -> str:
    """The place that a token names; empty for no token.

    Raises:
        ValueError: the text is no token, or one of another list.
    """
    if not token:
        return ""
    try:
        parts = base64.b64decode(token, altchars=b"-_", validate=True).decode().split("\n")
    except (binascii.Error, ValueError) as error:
        raise _invalid(token) from error
    if len(parts) != 3 or parts[0] != VERSION or token_of(*parts[1:]) != token:
        raise _invalid(token)
    if parts[1] != listed:
        raise ValueError(f"continue: the token is of the list {parts[1]!r}, not of {listed!r}")
    return parts[2]


def _invalid(token: str) -> ValueError:
    return ValueError(f"continue: {token[:100]!r} is no token of a page")
