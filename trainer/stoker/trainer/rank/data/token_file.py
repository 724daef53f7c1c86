"""Ready-tokenised files: a flat array of token ids, cut into documents behind each end token.

* `.npy`: one dimension, uint16 or uint32.
* `.bin` with a header of 256 int32 (magic 20240520, version 1 for uint16 and 2 for uint32, number of tokens), as llm.c
  and its followers write it, then the tokens.
* `.bin` without a header beside `<file>.json`: `{"dtype": "uint16" | "uint32", "eos_token_id": 50256}`.

A dtype beside a file that has a header must be that of the header. All little-endian. The end token is `eos_token_id`
of `<file>.json`, which any of these may have, else the tokenizer's.

Called by `source`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker.trainer.errors import DataError

MAGIC = 20240520
HEADER_BYTES = 1024
CHUNK_TOKENS = 1 << 22
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_VERSIONS: dict[int, np.dtype[Any]] = {1: DTYPES["uint16"], 2: DTYPES["uint32"]}


@dataclass(frozen=True)
class TokenFacts:
    """The sidecar of a file: both are optional."""

    dtype: str | None = None
    eos_token_id: int | None = None


def parse_facts(content: bytes, where: str) -> TokenFacts:
    """Parse `<file>.json`.

    Raises:
        DataError: it is not an object with these fields.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict) or set(fields) - {"dtype", "eos_token_id"}:
        raise DataError(f"{where}: an object with dtype and eos_token_id is needed, got {fields!r:.60}")
    dtype, eos = fields.get("dtype"), fields.get("eos_token_id")
    if dtype not in (None, *DTYPES):
        raise DataError(f"{where}: dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    if eos is not None and (not isinstance(eos, int) or isinstance(eos, bool) or eos < 0):
        raise DataError(f"{where}: eos_token_id must be a token number, got {eos!r}")
    return TokenFacts(dtype, eos)


def read_token_documents(
    stream: BinaryIO, where: str, is_npy: bool, facts: TokenFacts, end_id: int | None
) -> Iterator[tuple[NDArray[np.uint32], bool]]:
    """Yield the token ids of each document, with its end token, and whether that is there (not in a cut last one).

    Raises:
        DataError: the file has no known form, is cut short, no end token is known, or its dtype cannot hold it.
    """
    end = facts.eos_token_id if facts.eos_token_id is not None else end_id
    if end is None:
        raise DataError(f"{where}: the tokenizer has no end token: {where}.json must give eos_token_id")
    begun = b"" if is_npy else _read(stream, HEADER_BYTES)
    header = _npy_header(stream, where) if is_npy else _bin_header(begun)
    dtype, count = _form(header, where, facts)
    _check_end(end, dtype, where)
    left = np.empty(0, dtype=np.uint32)
    for chunk in _chunks(stream, where, dtype, count, b"" if header else begun):
        tokens = np.concatenate([left, chunk])
        begin = 0
        for place in np.flatnonzero(tokens[len(left) :] == end) + len(left):
            yield tokens[begin : place + 1], True
            begin = int(place) + 1
        left = tokens[begin:]
    if len(left):
        yield left, False


def _check_end(end: int, dtype: np.dtype[Any], where: str) -> None:
    """Refuse an end token that no token of the file can be: all documents would be one. Raises DataError."""
    most = int(np.iinfo(dtype).max)
    if end > most:
        raise DataError(
            f"{where}: its documents would never end: the end token {end} is none of {dtype}, 0 to {most}; write the "
            f"tokens as uint32, or give the token that ends its documents as eos_token_id in {where}.json"
        )


def _form(header: tuple[np.dtype[Any], int] | None, where: str, facts: TokenFacts) -> tuple[np.dtype[Any], int | None]:
    """The type of the tokens, and their number where a header counts them.

    Raises:
        DataError: neither the header nor the facts have the type, or both and they differ.
    """
    if header is None:
        if facts.dtype is None:
            raise DataError(f"{where}: it has no header of token files, and {where}.json with its dtype is missing")
        return DTYPES[facts.dtype], None
    if facts.dtype is not None and DTYPES[facts.dtype] != header[0]:
        raise DataError(f"{where}: its header says {header[0]}, {where}.json has dtype {facts.dtype}; leave that out")
    return header


def _chunks(
    stream: BinaryIO, where: str, dtype: np.dtype[Any], count: int | None, begun: bytes
) -> Iterator[NDArray[np.uint32]]:
    """The tokens in pieces; `count` None: up to the end of the file. `begun`: the first bytes, read already."""
    seen = 0
    while content := begun + _read(stream, CHUNK_TOKENS * dtype.itemsize - len(begun)):
        begun = b""
        if len(content) % dtype.itemsize:
            raise DataError(f"{where}: ends within a token of {dtype.itemsize} bytes")
        seen += len(content) // dtype.itemsize
        yield np.frombuffer(content, dtype=dtype).astype(np.uint32)
    if count is not None and seen != count:
        raise DataError(f"{where}: its header counts {count} tokens, the file holds {seen}")


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, fewer only at the end of the file: a network gives short reads."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _npy_header(stream: BinaryIO, where: str) -> tuple[np.dtype[Any], int]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise DataError(f"{where}: not a .npy file ({error})") from error
    if len(shape) != 1 or dtype not in DTYPES.values():
        raise DataError(f"{where}: one dimension of uint16 or uint32 is needed, got {dtype} {list(shape)}")
    return dtype, shape[0]


def _bin_header(begun: bytes) -> tuple[np.dtype[Any], int] | None:
    header = np.frombuffer(begun.ljust(12, b"\0")[:12], dtype="<i4")
    if header[0] != MAGIC or int(header[1]) not in _VERSIONS:
        return None
    return _VERSIONS[int(header[1])], int(header[2])
