"""The manifest: what a checkpoint holds and where each byte of it lies.

A manifest that is read is foreign input: its size and counts are bounded before it is parsed, and every value is
checked when it is made, before any file is opened. So a `Manifest` that exists is well-formed (plain file names, boxes
inside their tensors, sizes that multiply out). `cover.py` proves that its pieces cover each tensor exactly, and the
reader that the bytes are right.

Written once, by `store` at a commit; read by reader, verification, comparison, export and facts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from blake3 import blake3

from stoker.checkpoint.box import Box
from stoker.checkpoint.entries import (
    MANIFEST_FILE,
    PIECE_BYTES,
    FileEntry,
    Piece,
    TensorInfo,
    check_file_name,
    is_digest,
)
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError
from stoker.checkpoint.strict_json import (
    need_depth,
    need_fields,
    need_integers,
    need_list,
    need_object,
    need_text,
    parse_json,
)

__all__ = [
    "MANIFEST_FILE",
    "PIECE_BYTES",
    "Box",
    "FileEntry",
    "Manifest",
    "Piece",
    "TensorInfo",
    "check_file_name",
    "folder_name",
    "parse_folder_name",
]

FORMAT = 1
MAX_MANIFEST_BYTES = 96 * 2**20
MAX_PIECES = 250_000
"""Enough for 15 TiB in pieces of 64 MiB. Reading so many takes a few seconds and less than 1 GiB of memory."""
MAX_TENSORS = 200_000
MAX_FILES = 64
MAX_META_BYTES = 16 * 2**20
"""Largest `meta`, as canonical JSON."""
MAX_META_DEPTH = 32
MAX_CONTAINERS = 5 * MAX_PIECES + 2 * MAX_TENSORS + MAX_PIECES
"""Objects and lists: five for each piece, two for each tensor, and room for `meta`."""
MAX_VALUES = 25 * MAX_PIECES
"""Commas: a piece of a tensor with four dims has 16."""

_WRITER = re.compile(r"[0-9a-f]{8}")
_FOLDER = re.compile(r"step-([0-9]{8,12})\.([0-9a-f]{8})")


def folder_name(step: int, writer: str) -> str:
    """Return a checkpoint's folder name, such as `step-00001200.1a2b3c4d`."""
    if type(step) is not int or not 0 <= step < 10**12:
        raise CheckpointError(f"step {step!r} must be an integer from 0 to 10^12 - 1")
    if not _WRITER.fullmatch(writer):
        raise CheckpointError(f"writer {writer!r} must be 8 hex digits (0-9, a-f)")
    return f"step-{step:08d}.{writer}"


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Return step and writer, or None when it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    if match is None or folder_name(int(match[1]), match[2]) != name:
        return None
    return int(match[1]), match[2]


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint except the bytes. Make one with `build` or `from_json`; both check it."""

    format: int
    step: int
    writer: str
    tensors: Mapping[str, TensorInfo]
    """Tensors by name."""
    pieces: tuple[Piece, ...]
    """Ordered by file and offset."""
    files: tuple[FileEntry, ...]
    meta: Mapping[str, Any]
    """Small state and facts as JSON: tokens, loss, schedule, data cursor, RNG, configuration, lineage."""
    digest: str
    """blake3 of the canonical JSON without this field: the checkpoint's identity."""

    def __post_init__(self) -> None:
        if type(self.format) is not int or self.format != FORMAT:
            raise CheckpointError(f"format {self.format!r} is not supported, this program reads format {FORMAT}")
        folder_name(self.step, self.writer)
        if not is_digest(self.digest):
            raise CheckpointError(f"digest must be 64 hex digits, got {self.digest!r}")
        self._check_counts()
        for piece in self.pieces:
            self._check_piece(piece)
        self._check_names()

    @classmethod
    def build(
        cls,
        *,
        step: int,
        writer: str,
        tensors: Iterable[TensorInfo],
        pieces: Iterable[Piece],
        files: Iterable[FileEntry] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a manifest with its digest. The order in which ranks report their pieces does not matter."""
        named: dict[str, TensorInfo] = {}
        for tensor in tensors:
            if named.setdefault(tensor.name, tensor) != tensor:
                raise CheckpointError(f"tensor {tensor.name} is given as {named[tensor.name]} and as {tensor}")
        ordered = tuple(sorted(pieces, key=lambda piece: (piece.file, piece.offset)))
        sorted_files = tuple(sorted(files, key=lambda entry: entry.name))
        plain_meta = json.loads(_canonical(dict(meta or {})))
        content = _content(step, writer, named, ordered, sorted_files, plain_meta)
        return cls(FORMAT, step, writer, named, ordered, sorted_files, plain_meta, _digest_of(content))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return a manifest from untrusted text.

        Raises:
            CheckpointCorrupt: it is not JSON, holds something impossible, or its digest does not match.
        """
        try:
            return cls._parse(text)
        except CheckpointCorrupt:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"manifest: {error}") from error

    @classmethod
    def _parse(cls, text: str | bytes) -> Self:
        item = _read(text)
        digest = need_text(item["digest"], "digest")
        content = {key: value for key, value in item.items() if key != "digest"}
        if _digest_of(content) != digest:
            raise CheckpointCorrupt(f"manifest: its digest says {digest}, its content gives {_digest_of(content)}")
        return cls(
            format=item["format"],
            step=item["step"],
            writer=need_text(item["writer"], "writer"),
            tensors=_tensors(item["tensors"]),
            pieces=tuple(map(Piece.from_json, need_list(item["pieces"], "pieces", MAX_PIECES))),
            files=tuple(map(FileEntry.from_json, need_list(item["files"], "files", MAX_FILES))),
            meta=need_object(item["meta"], "meta"),
            digest=digest,
        )

    def to_json(self) -> str:
        """Return the text of `manifest.json`: canonical JSON and a line feed.

        Raises:
            CheckpointError: it is too long to be read again.
        """
        content = _content(self.step, self.writer, self.tensors, self.pieces, self.files, self.meta)
        text = _canonical(content | {"digest": self.digest}) + "\n"
        if (size := len(text.encode())) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"manifest: {size} bytes, {MAX_MANIFEST_BYTES} are allowed")
        return text

    @property
    def folder_name(self) -> str:
        return folder_name(self.step, self.writer)

    @property
    def bytes(self) -> int:
        """Bytes of all pieces and files (without the manifest itself)."""
        return sum(piece.bytes for piece in self.pieces) + sum(entry.bytes for entry in self.files)

    def file_sizes(self) -> dict[str, int]:
        """Exact size of every file of the folder except `manifest.json`."""
        sizes = {entry.name: entry.bytes for entry in self.files}
        for piece in self.pieces:
            sizes[piece.file] = max(sizes.get(piece.file, 0), piece.offset + piece.bytes)
        return sizes

    def _check_piece(self, piece: Piece) -> None:
        tensor = self.tensors.get(piece.tensor)
        if tensor is None:
            raise CheckpointError(f"{piece}: the manifest has no tensor of that name")
        if piece.dtype != tensor.dtype:
            raise CheckpointError(f"{piece}: dtype {piece.dtype}, but the tensor's is {tensor.dtype}")
        if not piece.box.inside(tensor.shape):
            raise CheckpointError(f"{piece}: the box leaves the tensor's shape {tensor.shape}")

    def _check_counts(self) -> None:
        """Refuse what could be written, but not be read again."""
        for what, count, limit in (
            ("tensors", len(self.tensors), MAX_TENSORS),
            ("pieces", len(self.pieces), MAX_PIECES),
            ("files", len(self.files), MAX_FILES),
            ("bytes of meta", len(_canonical(self.meta).encode()), MAX_META_BYTES),
        ):
            if count > limit:
                raise CheckpointError(f"{count} {what}, {limit} are allowed")
        need_depth(self.meta, "meta", MAX_META_DEPTH)

    def _check_names(self) -> None:
        names = [entry.name for entry in self.files]
        taken = {piece.file for piece in self.pieces}
        for name in names:
            if name in taken:
                raise CheckpointError(f"file {name} is listed twice")
            taken.add(name)


def _content(
    step: int,
    writer: str,
    tensors: Mapping[str, TensorInfo],
    pieces: Iterable[Piece],
    files: Iterable[FileEntry],
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step,
        "writer": writer,
        "tensors": {name: {"shape": list(tensor.shape), "dtype": tensor.dtype} for name, tensor in tensors.items()},
        "pieces": [piece.as_json() for piece in pieces],
        "files": [entry.as_json() for entry in files],
        "meta": dict(meta),
    }


def _canonical(content: Mapping[str, Any]) -> str:
    """JSON with sorted keys, no blanks, shortest numbers, UTF-8; NaN and infinity are refused."""
    try:
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"not plain JSON: {error}") from error


def _digest_of(content: Mapping[str, Any]) -> str:
    try:
        return blake3(_canonical(content).encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"text that is not Unicode: {error}") from error


def _read(text: str | bytes) -> dict[str, Any]:
    """Return the fields of a manifest of this format, with values that are not checked yet."""
    data = text.encode() if isinstance(text, str) else text
    raw = parse_json(data, max_bytes=MAX_MANIFEST_BYTES, max_containers=MAX_CONTAINERS, max_values=MAX_VALUES)
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise CheckpointError(f"format {raw.get('format')!r} is not supported, this program reads format {FORMAT}")
    return need_fields(raw, "manifest", _MANIFEST_KEYS)


def _tensors(raw: object) -> dict[str, TensorInfo]:
    tensors = {}
    for name, value in need_object(raw, "tensors").items():
        item = need_fields(value, f"tensor {name}", _TENSOR_KEYS)
        tensors[name] = TensorInfo(name, need_integers(item["shape"], "shape"), need_text(item["dtype"], "dtype"))
    return tensors


_TENSOR_KEYS = frozenset({"shape", "dtype"})
_MANIFEST_KEYS = frozenset({"format", "step", "writer", "tensors", "pieces", "files", "meta", "digest"})
