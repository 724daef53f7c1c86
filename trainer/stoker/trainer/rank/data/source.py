"""Data sources: from a path or URL to its documents, in an order that does not depend on the machine.

A path is a file, a folder (every file below it whose name and folders do not start with a dot) or a glob pattern (`**`
goes down); a URL is the same on another file system.

* Text (UTF-8): a file is a document. A larger one than `PIECE_BYTES` is cut at line ends, at a blank line where one is
  near, into documents of about that size, so that no file has to fit into memory; `ends` is true for the last piece
  only.
* JSONL (`.jsonl`, `.ndjson`, or `format: jsonl`): a line is a document: `{"text": "..."}`, or `{"messages": [{"role",
  "content"}, ...]}`.
* Parquet (`.parquet`, or `format: parquet`): a row is a document, its column `text` or `messages`.
* Tokens (`format: tokens`): ready-tokenised arrays (`token_file`), a document ends with the end token.

Text and JSONL may be compressed (`.jsonl.gz`, `.txt.zst`, ...; `compressed`).

Empty files, lines and texts are skipped; input that cannot be read is a `DataError`.

Read-only; called by `corpus`, `byte_bpe` and `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import DataSourceConfig
from stoker.trainer.rank.data.compressed import COMPRESSIONS, decompressed
from stoker.trainer.rank.data.files import DataFile, LocalFile, RemoteFile, remote_errors
from stoker.trainer.rank.data.parquet import read_rows
from stoker.trainer.rank.data.token_file import TokenFacts, parse_facts, read_token_documents

PIECE_BYTES = 256 << 10
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
TOKEN_SUFFIXES = (".npy", ".bin")
SIDECAR = ".json"
"""Behind the name of a file of tokens: facts about it, not data."""
ROLES = ("system", "user", "assistant", "tool")
ORIGIN_FIELDS = ("id", "meta", "metadata", "source", "timestamp", "url")
"""Fields about the origin of a line, which are skipped. Other fields are refused: they could be training data."""

Message = dict[str, str]


@dataclass(frozen=True)
class Text:
    """Plain text; every token is learned. `ends` is False for a piece of a file that goes on."""

    text: str
    ends: bool = True


@dataclass(frozen=True)
class Conversation:
    """Messages `{role, content}`; only the assistant's tokens are learned."""

    messages: tuple[Message, ...]
    where: str = field(default="", compare=False)
    """File and line, for errors."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A document that is tokenised already; every token is learned."""

    ids: NDArray[np.uint32]
    """[tokens], with the end token where it ends."""
    where: str = ""
    """File and number of the document, for errors."""


Document = Text | Conversation | Tokens
Kind = Literal["text", "jsonl", "parquet", "tokens"]


def read_documents(source: DataSourceConfig, files: list[DataFile], end_id: int | None = None) -> Iterator[Document]:
    """The documents of the files, in order, read as a stream. `end_id`: the tokenizer's token that ends a text."""
    for file in files:
        where = f"data source {source.name}: {file.name}"
        try:
            kind, compression = kind_of(source, file), file.suffixes.compression
            _check_compression(kind, compression, where)
            with (
                _named_errors(file, where),
                file.open() as stream,
                decompressed(stream, compression, where) as content,
            ):
                yield from _read(kind, file, content, end_id)
        except OSError as error:
            raise DataError(f"{where}: {error.strerror or error}") from error


def _named_errors(file: DataFile, where: str) -> AbstractContextManager[None]:
    return remote_errors(where) if isinstance(file, RemoteFile) else nullcontext()


def _check_compression(kind: Kind, compression: str, where: str) -> None:
    if compression and kind not in ("text", "jsonl"):
        allowed = ", ".join(COMPRESSIONS)
        raise DataError(f"{where}: {kind} in a {compression} file; only text and JSONL may be compressed ({allowed})")


def kind_of(source: DataSourceConfig, file: DataFile) -> Kind:
    """The form of a file: the source's format, or by its suffix."""
    if source.format != "auto":
        return source.format
    suffix = file.suffixes.data
    if suffix == PARQUET_SUFFIX:
        return "parquet"
    return "jsonl" if suffix in JSONL_SUFFIXES else "text"


def data_files(source: DataSourceConfig, files: list[DataFile]) -> list[DataFile]:
    """The files that hold documents: of ready-tokenised ones not the sidecars."""
    if source.format != "tokens":
        return files
    names = {file.name for file in files}
    found = [file for file in files if file.name.removesuffix(SIDECAR) not in names - {file.name}]
    wrong = [file.name for file in found if file.suffixes not in [(suffix, "") for suffix in TOKEN_SUFFIXES]]
    if wrong:
        raise DataError(
            f"data source {source.name}: {wrong[0]} is no file of tokens; allowed: {', '.join(TOKEN_SUFFIXES)}"
        )
    return found


def token_facts(file: DataFile) -> TokenFacts:
    """The sidecar of a file of tokens; no facts where it has none.

    Raises:
        DataError: it is not of its form.
    """
    sidecar = f"{file.name}{SIDECAR}"
    if isinstance(file, LocalFile):
        path = file.path.with_name(f"{file.path.name}{SIDECAR}")
        return parse_facts(path.read_bytes(), sidecar) if path.is_file() else TokenFacts()
    assert isinstance(file, RemoteFile)
    with remote_errors(sidecar):
        place = f"{file.path}{SIDECAR}"
        return parse_facts(file.system.cat_file(place), sidecar) if file.system.isfile(place) else TokenFacts()


def _read(kind: Kind, file: DataFile, stream: BinaryIO, end_id: int | None) -> Iterator[Document]:
    where = file.name
    if kind == "parquet":
        for place, fields in read_rows(stream, where):
            yield from _wanted(_parse_fields(fields, place))
    elif kind == "tokens":
        documents = read_token_documents(stream, where, file.suffixes.data == ".npy", token_facts(file), end_id)
        for number, (ids, _) in enumerate(documents, start=1):
            yield Tokens(ids, f"{where}: document {number}")
    elif kind == "jsonl":
        yield from _read_lines(where, stream)
    else:
        yield from _read_text(where, stream)


def _wanted(document: Document) -> Iterator[Document]:
    """The document, unless it is empty."""
    if document != Text(""):
        yield document


def _read_text(file: str, stream: BinaryIO) -> Iterator[Text]:
    piece: list[bytes] = []
    size = 0
    offset = 0
    for line in stream:
        if size >= PIECE_BYTES and (not line.strip() or size >= 2 * PIECE_BYTES):
            yield Text(_decode(b"".join(piece), file, offset), ends=False)
            offset, piece, size = offset + size, [], 0
        piece.append(line)
        size += len(line)
    if size:
        yield Text(_decode(b"".join(piece), file, offset))


def _read_lines(file: str, stream: BinaryIO) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield from _wanted(_parse_line(line, f"{file}:{number}"))


def _decode(content: bytes, where: str, offset: int = 0) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {offset + error.start} is not UTF-8 text ({error.reason}); "
            "convert the file or leave it out (a glob pattern selects files)"
        ) from error


def _parse_line(line: bytes, where: str) -> Document:
    text = _decode(line, where)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a JSON object is needed, got {type(fields).__name__}")
    unknown = sorted(set(fields) - {"text", "messages", *ORIGIN_FIELDS})
    if unknown or ("text" in fields) == ("messages" in fields):
        raise DataError(
            f"{where}: exactly one of text and messages is needed, got {sorted(fields)}; "
            f"also allowed: {', '.join(ORIGIN_FIELDS)}"
        )
    return _parse_fields(fields, where)


def _parse_fields(fields: dict[str, Any], where: str) -> Document:
    """A document from `text` or `messages`, of which one is there."""
    if "messages" in fields:
        return Conversation(_parse_messages(fields["messages"], where), where)
    return Text(_need_text(fields["text"], f"{where}: text"))


def _parse_messages(messages: object, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list with at least one message, got {_shown(messages)}")
    parsed = tuple(_parse_message(message, f"{where}: messages[{index}]") for index, message in enumerate(messages))
    if all(message["role"] != "assistant" for message in parsed):
        raise DataError(f"{where}: no message has the role assistant, so there is nothing to learn")
    return parsed


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        found = sorted(message) if isinstance(message, dict) else _shown(message)
        raise DataError(f"{where}: exactly the fields role and content are needed, got {found}")
    if message["role"] not in ROLES:
        raise DataError(f"{where}: role {_shown(message['role'])} is unknown; allowed: {', '.join(ROLES)}")
    return {"role": message["role"], "content": _need_text(message["content"], f"{where}: content")}


def _need_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} must be a string, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair at character {error.start}, which is not text"
        ) from error
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
