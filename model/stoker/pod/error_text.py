"""What an error says, for a line of a message: an error without words says its type."""

from __future__ import annotations


def text_of(error: BaseException) -> str:
    """The error's own words on one line, else the name of its type: a TimeoutError, for one, has no words."""
    return " ".join(str(error).split()) or type(error).__name__
