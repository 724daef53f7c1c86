"""Texts that a status, a condition or an Event can hold.

Pure: cut to the allowed length and characters. Called before a text is written.
"""

from __future__ import annotations

LONGEST_TEXT = 1024
"""Characters of a message field in the CRDs, and of an Event's message."""


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, cut to `longest` characters; a cut text ends in three dots."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
