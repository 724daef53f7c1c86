"""Limits on the header of a safetensors file, checked before a library parses it.

The header is JSON from outside, whose parts are counted before objects are made of them. Pure; called by
`hugging_face`.
"""

from __future__ import annotations

import struct
from pathlib import Path

from stoker.model.weights.loading import WeightsError

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 100_000
"""Tensors of one file."""
LENGTH = struct.Struct("<Q")


def check_header(file: Path) -> None:
    """Refuse a header with more bytes or more parts than the weights of a model have.

    Raises:
        WeightsError: the message names what there is too much of.
    """
    with file.open("rb") as opened:
        start = opened.read(LENGTH.size)
        if len(start) < LENGTH.size:
            return  # too short for a header: the library says so
        (length,) = LENGTH.unpack(start)
        if length > file.stat().st_size:
            return  # no safetensors file at all: the library says so
        refuse_more(file, "bytes of header", length, MAX_HEADER_BYTES)
        header = opened.read(length)
    refuse_more(file, "tensors", header.count(b"{"), MAX_TENSORS)
    refuse_more(file, "keys", header.count(b":"), 5 * MAX_TENSORS)
    refuse_more(file, "values", header.count(b","), 12 * MAX_TENSORS)


def refuse_more(file: Path, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise WeightsError(f"{file}: {count} {what}; at most {limit} are allowed")
