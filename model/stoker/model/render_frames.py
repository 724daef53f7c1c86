"""The frames between a program and its render process: what both ends must agree on.

The first question is a template's source, each later one the JSON object of a conversation's variables.
"""

from __future__ import annotations

import struct

QUESTION = struct.Struct("<dI")
"""CPU seconds that the answer may take, and the length of the question that follows."""
ANSWER = struct.Struct("<cI")
"""DONE or REFUSED, and the length of the text that follows."""
DONE, REFUSED = b"D", b"R"
"""The text is the result; it is the reason why there is none."""
OUT_OF_MEMORY = 3
"""Exit code of a render process that reached its memory limit."""
MAX_TEXT_CHARACTERS = 8 * 2**20
"""Longest rendered prompt."""
MAX_REASON_CHARACTERS = 2000
MEMORY_BYTES = 256 * 2**20
"""Memory that a render process may allocate beyond its own code."""


def encode_text(text: str) -> bytes:
    """UTF-8 that also carries a lone half of a surrogate pair, which JSON lets a client send."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """The inverse of `encode_text`."""
    return data.decode("utf-8", "surrogatepass")
