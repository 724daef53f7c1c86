"""The stream that one client has got, kept so that another engine can go on behind it.

Bytes are passed on as they are and kept unread. They are read when a backend fails, or in batches of 16 KiB when there
are many: the tokens of a choice take 4 bytes each then. `stoker.pod.marked_streams` explains the marks.

One object per resumable stream, made by `Proxy`. No I/O.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.pod.marked_streams import MARK, RESUME_PATH
from stoker.pod.stream_comments import without_comments
from stoker.router.connection import Outgoing

RAW_BYTES = 16 * 1024
"""Bytes that are kept unread."""
LONGEST_UPDATE_BYTES = 4 << 20
"""Beyond it an engine that promised marks has sent none."""
DONE = b"data: [DONE]\n\n"
_MARK = f',"{MARK}":{{'.encode()
_END = b"\n\n"
_DATA = b"data: "
_DONE_TEXT = DONE.decode()
_DECODER = json.JSONDecoder()


class NotResumable(Exception):
    """The stream cannot go on elsewhere; the message has the reason."""


@dataclass
class _Choice:
    tokens: array[int] = field(default_factory=lambda: array("I"))
    seed: int | None = None
    ended: bool = False
    end: int | None = None

    def body(self, index: int) -> dict[str, Any]:
        return {
            "index": index, "tokens": self.tokens.tolist(), "seed": self.seed, "ended": self.ended, "end": self.end,
        }  # fmt: skip


class KeptStream:
    """What a client has got of one stream, and its request."""

    def __init__(self, request: Outgoing, path: str) -> None:
        self.request = request
        self.path = path
        self.last_byte_s = 0.0
        """When bytes of the stream came last."""
        self._raw = bytearray()
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] | None = None
        """Fields that every chunk has."""
        self._problem: str | None = None
        self._used = False
        """Whether the chunk with the usage was sent, which is the last one."""

    @property
    def complete(self) -> bool:
        """Whether only the end of the stream has not been sent."""
        self._read()
        return self._used and self._problem is None

    def add(self, data: bytes) -> None:
        """Note whole updates that are sent to the client."""
        if self._problem is not None:
            return
        self._raw += data
        if len(self._raw) > RAW_BYTES:
            self._read()

    def give_up(self, problem: str) -> None:
        """Keep no more: the stream is not as the engine promised."""
        self._problem = problem
        self._raw.clear()
        self._choices.clear()

    def next_request(self) -> Outgoing:
        """The request for the rest of the stream; of a stream of which nothing was sent, the client's.

        Raises:
            NotResumable: the stream is not as the engine promised.
        """
        self._read()
        if self._problem is not None:
            raise NotResumable(self._problem)
        if self._head is None:
            return self.request
        return Outgoing("POST", RESUME_PATH.encode(), self.request.headers, self._resume_body(self._head))

    def _resume_body(self, head: Mapping[str, Any]) -> bytes:
        choices = [choice.body(index) for index, choice in sorted(self._choices.items())]
        state = {"path": self.path, **head, "choices": choices}
        return json.dumps(state, separators=(",", ":")).encode() + b"\n" + self.request.body

    def _read(self) -> None:
        raw, self._raw = self._raw, bytearray()
        try:
            for chunk in _chunks_of(raw.decode()):
                self._read_chunk(chunk)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.give_up(f"a chunk is not as promised: {type(error).__name__}: {error}")

    def _read_chunk(self, chunk: dict[str, Any]) -> None:
        if self._head is None:
            self._head = {"id": chunk["id"], "created": chunk["created"], "fingerprint": chunk["system_fingerprint"]}
        mark = chunk.get(MARK, {})
        self._used = not chunk["choices"]
        for part in chunk["choices"]:
            choice = self._choices.setdefault(part["index"], _Choice())
            choice.tokens.extend(mark.get("tokens", ()))
            choice.seed = mark.get("seed", choice.seed)
            choice.end = mark.get("end", choice.end)
            choice.ended = choice.ended or part["finish_reason"] is not None


def _chunks_of(events: str) -> Iterator[dict[str, Any]]:
    """Yield the content of whole events, but for the end of the stream.

    Raises:
        ValueError: one is not `data: ` and a JSON text.
    """
    at = 0
    while at < len(events):
        if events.startswith(":", at):
            end = events.find("\n\n", at)
            at = end + 2 if end >= 0 else len(events)
        elif not events.startswith(_DONE_TEXT, at):
            if not events.startswith("data: ", at):
                raise ValueError(f"not the begin of an event: {events[at : at + 20]!r}")
            chunk, end = _DECODER.raw_decode(events, at + 6)
            if not events.startswith("\n\n", end):
                raise ValueError(f"not the end of an event: {events[end : end + 20]!r}")
            yield chunk
            at = end + 2
        else:
            at += len(_DONE_TEXT)


class UpdateCutter:
    """Cuts a marked stream behind whole updates."""

    def __init__(self) -> None:
        self.tail = bytearray()
        """Bytes behind the last whole update."""

    def add(self, data: bytes) -> bytes:
        """Add bytes of the stream; return the whole updates among those that were not returned yet.

        Raises:
            NotResumable: there are none for too long.
        """
        tail = self.tail
        if not tail and (at := data.rfind(_MARK)) >= 0 and data.find(_END, at) == len(data) - len(_END):
            return data  # as a rule, a part ends with an update
        tail += data
        for mark in _marks_from_the_end(tail):
            end = tail.find(_END, mark)
            if end >= 0:
                whole = bytes(tail[: end + len(_END)])
                del tail[: end + len(_END)]
                return whole
        if len(tail) > LONGEST_UPDATE_BYTES:
            raise NotResumable(f"an update has more than {LONGEST_UPDATE_BYTES} bytes")
        return b""

    @property
    def complete(self) -> bool:
        """Whether nothing but the end of the stream is left."""
        return self._end == DONE

    @property
    def error_code(self) -> str | None:
        """The code of the error event that ends the stream."""
        if not self._end.startswith(b'data: {"error"'):
            return None
        try:
            error = json.loads(self._end.partition(_END)[0].removeprefix(_DATA))["error"]
            return str(error.get("code"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def _end(self) -> bytes:
        """What is behind the last whole update, but for comments."""
        return without_comments(bytes(self.tail))


def _marks_from_the_end(data: bytearray) -> Iterator[int]:
    """Positions of marks, the last one first. In a JSON text their quotes would be escaped."""
    at = data.rfind(_MARK)
    while at >= 0:
        yield at
        at = data.rfind(_MARK, 0, at)
