"""The manifest: what a checkpoint holds and where each byte of it lies.

A manifest that is read is foreign input: every value is checked when it is made, before any file is opened, so a `Manifest` that exists is
well-formed (plain file names, boxes inside their tensors, sizes that multiply out). Whether its pieces cover each tensor exactly is
`cover.py`'s question, and whether the bytes are right is the reader's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from blake3 import blake3

from stoker.checkpoint.box import MAX_DIMS, MAX_ELEMENTS, Box
from stoker.checkpoint.dtype import item_bytes
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError

__all__ = ["Box", "FileEntry", "Manifest", "Piece", "TensorInfo", "folder_name", "parse_folder_name"]

FORMAT = 1
MANIFEST_FILE = "manifest.json"
PIECE_BYTES = 64 * 2**20
"""Longest piece; a shard is cut at this size, so reading and verifying need no more memory than this."""
MAX_MANIFEST_BYTES = 512 * 2**20
MAX_OFFSET = 1 << 62

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_TENSOR_NAME = re.compile(r"[\x21-\x7e]{1,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WRITER = re.compile(r"[0-9a-f]{8}")
_FOLDER = re.compile(r"step-([0-9]{8,12})\.([0-9a-f]{8})")


def folder_name(step: int, writer: str) -> str:
    """`step-00001200.1a2b3c4d`."""
    if type(step) is not int or not 0 <= step < 10**12:
        raise CheckpointError(f"step {step!r} must be an integer from 0 to 10^12 - 1")
    if not _WRITER.fullmatch(writer):
        raise CheckpointError(f"writer {writer!r} must be 8 hex digits (0-9, a-f)")
    return f"step-{step:08d}.{writer}"


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """Step and writer, or None when it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    if match is None or folder_name(int(match[1]), match[2]) != name:
        return None
    return int(match[1]), match[2]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Piece:
    """The unit of writing and of verification: the elements `box[flat_start:flat_end]` of a tensor, as raw little-endian bytes in a file."""

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
        _check_range(f"{self}: offset", self.offset, 0, MAX_OFFSET)
        if type(self.flat_start) is not int or type(self.flat_end) is not int:
            raise CheckpointError(f"{self}: flat range must be integers")
        if not 0 <= self.flat_start < self.flat_end <= self.box.volume:
            raise CheckpointError(f"{self}: flat range must be a non-empty part of 0..{self.box.volume}")
        expected = (self.flat_end - self.flat_start) * item_bytes(self.dtype)
        if type(self.bytes) is not int or self.bytes != expected:
            raise CheckpointError(f"{self}: {self.bytes} bytes, but its elements take {expected}")
        if self.bytes > PIECE_BYTES:
            raise CheckpointError(f"{self}: {self.bytes} bytes, {PIECE_BYTES} are allowed")
        _check_digest(f"{self}: blake3", self.blake3)

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
        """A piece from JSON data (a manifest's, or what a rank reports)."""
        item = _fields(raw, "piece", _PIECE_KEYS)
        box = _fields(item["box"], "box", _BOX_KEYS)
        flat = _integers(item["flat"], "flat")
        if len(flat) != 2:
            raise CheckpointError(f"flat {flat} must be two integers")
        return cls(
            tensor=_text(item["tensor"], "tensor"),
            box=Box(_integers(box["start"], "start"), _integers(box["size"], "size")),
            flat_start=flat[0],
            flat_end=flat[1],
            dtype=_text(item["dtype"], "dtype"),
            file=_text(item["file"], "file"),
            offset=item["offset"],
            bytes=item["bytes"],
            blake3=_text(item["blake3"], "blake3"),
        )

    def __str__(self) -> str:
        return f"piece {self.tensor}{self.box}[{self.flat_start}:{self.flat_end}] in {self.file} at {self.offset}"


@dataclass(frozen=True)
class FileEntry:
    """A small file that travels along as it is: `config.json`, tokenizer files, chat template, `generation_config.json`."""

    name: str
    bytes: int
    blake3: str

    def __post_init__(self) -> None:
        check_file_name(self.name)
        _check_range(f"file {self.name}: bytes", self.bytes, 0, MAX_OFFSET)
        _check_digest(f"file {self.name}: blake3", self.blake3)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "blake3": self.blake3}

    @classmethod
    def from_json(cls, raw: object) -> Self:
        item = _fields(raw, "file entry", _FILE_KEYS)
        return cls(_text(item["name"], "name"), item["bytes"], _text(item["blake3"], "blake3"))


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint except the bytes. Make one with `build` or `from_json`; both check it."""

    format: int
    step: int
    writer: str
    tensors: Mapping[str, TensorInfo]
    """By name."""
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
        _check_digest("digest", self.digest)
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
        """A manifest with its digest. The order in which ranks report their pieces does not matter."""
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
        """A manifest from untrusted text.

        Raises:
            CheckpointCorrupt: it is not JSON, says something impossible, or its digest does not match.
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
        digest = _text(item["digest"], "digest")
        content = {key: value for key, value in item.items() if key != "digest"}
        if _digest_of(content) != digest:
            raise CheckpointCorrupt(f"manifest: its digest says {digest}, its content gives {_digest_of(content)}")
        return cls(
            format=item["format"],
            step=item["step"],
            writer=_text(item["writer"], "writer"),
            tensors=_tensors(item["tensors"]),
            pieces=tuple(map(Piece.from_json, _list(item["pieces"], "pieces"))),
            files=tuple(map(FileEntry.from_json, _list(item["files"], "files"))),
            meta=_object(item["meta"], "meta"),
            digest=digest,
        )

    def to_json(self) -> str:
        """The text of `manifest.json`: canonical JSON and a line feed."""
        content = _content(self.step, self.writer, self.tensors, self.pieces, self.files, self.meta)
        return _canonical(content | {"digest": self.digest}) + "\n"

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

    def _check_names(self) -> None:
        names = [entry.name for entry in self.files]
        taken = {piece.file for piece in self.pieces}
        for name in names:
            if name in taken:
                raise CheckpointError(f"file {name} is listed twice")
            taken.add(name)


def check_file_name(name: object) -> None:
    """Refuse anything but a plain name: no separator, no leading dot, not the manifest itself."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST_FILE:
        raise CheckpointError(
            f"file name {name!r} must be a plain name (letters, digits, . _ + -, no leading dot, not {MANIFEST_FILE})"
        )


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
    """The fields of a manifest of this format; what they hold is not looked at yet."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{len(text)} bytes, {MAX_MANIFEST_BYTES} are allowed")
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    raw = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise CheckpointError(f"format {raw.get('format')!r} is not supported, this program reads format {FORMAT}")
    return _fields(raw, "manifest", _MANIFEST_KEYS)


def _tensors(raw: object) -> dict[str, TensorInfo]:
    tensors = {}
    for name, value in _object(raw, "tensors").items():
        item = _fields(value, f"tensor {name}", _TENSOR_KEYS)
        tensors[name] = TensorInfo(name, _integers(item["shape"], "shape"), _text(item["dtype"], "dtype"))
    return tensors


_PIECE_KEYS = frozenset({"tensor", "box", "flat", "dtype", "file", "offset", "bytes", "blake3"})
_BOX_KEYS = frozenset({"start", "size"})
_FILE_KEYS = frozenset({"name", "bytes", "blake3"})
_TENSOR_KEYS = frozenset({"shape", "dtype"})
_MANIFEST_KEYS = frozenset({"format", "step", "writer", "tensors", "pieces", "files", "meta", "digest"})


def _fields(raw: object, what: str, keys: frozenset[str]) -> dict[str, Any]:
    item = _object(raw, what)
    if item.keys() != keys:
        odd = sorted(item.keys() ^ keys)
        raise CheckpointError(f"{what}: keys must be {sorted(keys)}; missing or unknown: {odd}")
    return item


def _object(raw: object, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{what}: an object is needed, got {type(raw).__name__}")
    return raw


def _list(raw: object, what: str) -> list[Any]:
    if not isinstance(raw, list):
        raise CheckpointError(f"{what}: a list is needed, got {type(raw).__name__}")
    return raw


def _text(raw: object, what: str) -> str:
    if not isinstance(raw, str):
        raise CheckpointError(f"{what}: text is needed, got {type(raw).__name__}")
    return raw


def _integers(raw: object, what: str) -> tuple[int, ...]:
    values = _list(raw, what)
    if any(type(value) is not int for value in values):
        raise CheckpointError(f"{what}: integers are needed, got {values}")
    return tuple(values)


def _check_range(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{what} must be an integer from {low} to {high}, got {value!r}")


def _check_digest(what: str, value: object) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise CheckpointError(f"{what} must be 64 hex digits, got {value!r}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) != len(pairs):
        raise CheckpointError("a key appears twice in one object")
    return item


def _no_constant(name: str) -> float:
    raise CheckpointError(f"{name} is not a number of JSON")
