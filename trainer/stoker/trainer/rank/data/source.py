"""Data sources: from a path to its documents, in an order that does not depend on the machine.

A path is a file, a folder (every file below it whose name and folders do not start with a dot) or a glob pattern (`**`
goes down).

* Text (UTF-8): a file is a document. A larger one than `PIECE_BYTES` is cut at line ends, at a blank line where one is
  near, into documents of about that size, so that no file has to fit into memory; `ends` is true for the last piece
  only.
* JSONL (`.jsonl`, `.ndjson`, or `format: jsonl`): a line is a document: `{"text": "..."}`, or `{"messages": [{"role",
  "content"}, ...]}`.

Empty files, lines and texts are skipped; input that cannot be read is a `DataError`.

Read-only; called by `corpus`, `byte_bpe` and `tokens`.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import DataSourceConfig

PIECE_BYTES = 256 << 10
JSONL_SUFFIXES = (".jsonl", ".ndjson")
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


Document = Text | Conversation


def list_files(source: DataSourceConfig) -> list[Path]:
    """The files of a source, sorted by path.

    Raises:
        DataError: nothing is there.
    """
    assert source.path is not None, "data.sources[].url is refused by name"
    path = Path(source.path)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
    elif glob.has_magic(source.path):
        names = glob.iglob(source.path, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
        found = (Path(name) for name in names if Path(name).is_file())
    else:
        raise DataError(
            f"data source {source.name}: {source.path} does not exist; a file, folder or glob pattern is needed"
        )
    files = sorted(found)
    if not files:
        raise DataError(f"data source {source.name}: {source.path} holds no file")
    return files


def read_documents(source: DataSourceConfig, files: list[Path]) -> Iterator[Document]:
    """The documents of the files, in order, read as a stream."""
    for file in files:
        try:
            with file.open("rb") as stream:
                yield from _read_lines(file, stream) if is_jsonl(source, file) else _read_text(file, stream)
        except OSError as error:
            raise DataError(f"data source {source.name}: {file}: {error.strerror or error}") from error


def is_jsonl(source: DataSourceConfig, file: Path) -> bool:
    if source.format == "auto":
        return file.suffix.lower() in JSONL_SUFFIXES
    return source.format == "jsonl"


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_text(file: Path, stream: BinaryIO) -> Iterator[Text]:
    piece: list[bytes] = []
    size = 0
    offset = 0
    for line in stream:
        if size >= PIECE_BYTES and (not line.strip() or size >= 2 * PIECE_BYTES):
            yield Text(_decode(b"".join(piece), f"{file}", offset), ends=False)
            offset, piece, size = offset + size, [], 0
        piece.append(line)
        size += len(line)
    if size:
        yield Text(_decode(b"".join(piece), f"{file}", offset))


def _read_lines(file: Path, stream: BinaryIO) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            document = _parse_line(line, f"{file}:{number}")
            if document != Text(""):
                yield document


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
