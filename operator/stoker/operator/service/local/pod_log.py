"""Read the log file of a pod: its end, or on and on until the pod has ended.

Called by `kube_api`. Only reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

LOOK_S = 0.2
CHUNK_BYTES = 1 << 16
MAX_BYTES = 64 << 20
"""Longest part of a log that one answer holds: its end."""


def read_tail(file: Path, lines: int | None) -> bytes:
    """The last lines of a file, or all of it: at most `MAX_BYTES`, beginning with a whole line."""
    return _tail(file, lines)[0]


async def follow(file: Path, lines: int | None, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the last lines, then what is appended, until `ended` holds and everything was read."""
    content, offset = await asyncio.to_thread(_tail, file, lines)
    if content:
        yield content
    while True:
        over = ended()
        new = await asyncio.to_thread(_read_from, file, offset)
        if new:
            offset += len(new)
            yield new
        elif over:
            return
        else:
            await asyncio.sleep(LOOK_S)


def _tail(file: Path, lines: int | None) -> tuple[bytes, int]:
    """The end of a file, and the offset behind it."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MAX_BYTES))
            content = stream.read(min(size, MAX_BYTES))
    except FileNotFoundError:
        return b"", 0
    if size > MAX_BYTES:
        content = content.partition(b"\n")[2]
    if lines is None:
        return content, size
    return _last_lines(content, lines), size


def _last_lines(content: bytes, lines: int) -> bytes:
    """The last lines; only a line feed ends one, as a progress bar writes carriage returns."""
    whole = content.removesuffix(b"\n")
    if not content or not lines:
        return b""
    return b"\n".join(whole.split(b"\n")[-lines:]) + content[len(whole) :]


def _read_from(file: Path, offset: int) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""
