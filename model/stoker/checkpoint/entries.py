"""The entries of a manifest: tensors, the pieces that hold their elements, and the files that travel along.

Every value is checked when it is made, so an entry that exists is well-formed: plain file names, sizes that multiply
out.

Immutable values; `manifest` is made of them.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Any, Self

from stoker.checkpoint.box import MAX_DIMS, MAX_ELEMENTS, Box
from stoker.checkpoint.dtype import item_bytes
from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.strict_json import need_fields, need_integers, need_text

MANIFEST_FILE = "manifest.json"
PIECE_BYTES = 64 * 2**20
"""Longest piece; a shard is cut at this size, so reading and verifying need no more memory than this."""
MAX_FILE_BYTES = 256 * 2**20
"""Largest file that travels along: readers hold such a file in memory."""
MAX_OFFSET = 1 << 62

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_TENSOR_NAME = re.compile(r"[\x21-\x7e]{1,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A global tensor of the state: its name, whole shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _TENSOR_NAME.fullmatch(self.name):
            raise CheckpointError(
                f"tensor name {self.name!r} must be 1 to 512 printable ASCII characters without blanks"
            )
        if len(self.shape) > MAX_DIMS or any(type(extent) is not int or extent < 0 for extent in self.shape):
            raise CheckpointError(f"tensor {self.name}: shape {self.shape} must be at most {MAX_DIMS} integers >= 0")
        if math.prod(self.shape) > MAX_ELEMENTS:
            raise CheckpointError(f"tensor {self.name}: shape {self.shape} has more than {MAX_ELEMENTS} elements")
        item_bytes(self.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit of writing and of verification.

    It holds the elements `box[flat_start:flat_end]` of a tensor, as raw little-endian bytes in a file.
    """

    tensor: str
    box: Box
    flat_start: int
    flat_end: int
    dtype: str
    file: str
    offset: int
    bytes: int
    blake3: str

    def __post_init__(self) -> None:
        check_file_name(self.file)
        if not _is_within(self.offset, MAX_OFFSET):
            raise CheckpointError(f"{self}: offset must be an integer from 0 to {MAX_OFFSET}, got {self.offset!r}")
        if type(self.flat_start) is not int or type(self.flat_end) is not int:
            raise CheckpointError(f"{self}: flat range must be integers")
        if not 0 <= self.flat_start < self.flat_end <= self.box.volume:
            raise CheckpointError(f"{self}: flat range must be a non-empty part of 0..{self.box.volume}")
        expected = (self.flat_end - self.flat_start) * item_bytes(self.dtype)
        if type(self.bytes) is not int or self.bytes != expected:
            raise CheckpointError(f"{self}: {self.bytes} bytes, but its elements take {expected}")
        if self.bytes > PIECE_BYTES:
            raise CheckpointError(f"{self}: {self.bytes} bytes, {PIECE_BYTES} are allowed")
        if not is_digest(self.blake3):
            raise CheckpointError(f"{self}: blake3 must be 64 hex digits, got {self.blake3!r}")

    def as_json(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "box": {"start": list(self.box.start), "size": list(self.box.size)},
            "flat": [self.flat_start, self.flat_end],
            "dtype": self.dtype,
            "file": self.file,
            "offset": self.offset,
            "bytes": self.bytes,
            "blake3": self.blake3,
        }

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """Return a piece from JSON data (a manifest's, or what a rank reports)."""
        item = need_fields(raw, "piece", _PIECE_KEYS)
        box = need_fields(item["box"], "box", _BOX_KEYS)
        flat = need_integers(item["flat"], "flat")
        if len(flat) != 2:
            raise CheckpointError(f"flat {flat} must be two integers")
        return cls(  # interned: thousands of pieces share a tensor's, a file's and a dtype's name
            tensor=sys.intern(need_text(item["tensor"], "tensor")),
            box=Box(need_integers(box["start"], "start"), need_integers(box["size"], "size")),
            flat_start=flat[0],
            flat_end=flat[1],
            dtype=sys.intern(need_text(item["dtype"], "dtype")),
            file=sys.intern(need_text(item["file"], "file")),
            offset=item["offset"],
            bytes=item["bytes"],
            blake3=need_text(item["blake3"], "blake3"),
        )

    def __str__(self) -> str:
        return f"piece {self.tensor}{self.box}[{self.flat_start}:{self.flat_end}] in {self.file} at {self.offset}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A small file that travels along as it is: `config.json`, tokenizer, chat template, `generation_config.json`."""

    name: str
    bytes: int
    blake3: str

    def __post_init__(self) -> None:
        check_file_name(self.name)
        if not _is_within(self.bytes, MAX_FILE_BYTES):
            raise CheckpointError(
                f"file {self.name}: bytes must be an integer from 0 to {MAX_FILE_BYTES}, got {self.bytes!r}"
            )
        if not is_digest(self.blake3):
            raise CheckpointError(f"file {self.name}: blake3 must be 64 hex digits, got {self.blake3!r}")

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "blake3": self.blake3}

    @classmethod
    def from_json(cls, raw: object) -> Self:
        item = need_fields(raw, "file entry", _FILE_KEYS)
        return cls(need_text(item["name"], "name"), item["bytes"], need_text(item["blake3"], "blake3"))


def check_file_name(name: object) -> None:
    """Refuse anything but a plain name: no separator, no leading dot, not the manifest itself."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST_FILE:
        raise CheckpointError(
            f"file name {name!r} must be a plain name (letters, digits, . _ + -, no leading dot, not {MANIFEST_FILE})"
        )


def is_digest(value: object) -> bool:
    """Whether `value` is a blake3 hash: 64 lower-case hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_within(value: object, high: int) -> bool:
    return type(value) is int and 0 <= value <= high


_PIECE_KEYS = frozenset({"tensor", "box", "flat", "dtype", "file", "offset", "bytes", "blake3"})
_BOX_KEYS = frozenset({"start", "size"})
_FILE_KEYS = frozenset({"name", "bytes", "blake3"})
