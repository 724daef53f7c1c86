"""Lines of a stream of bytes, split at line feeds alone: a carriage return or an exotic separator ends none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

MAX_LINE = 8 << 20
"""Bytes after which a line is cut."""


class WholeLines:
    """Bytes on their way to lines. A last line may have no end."""

    def __init__(self, longest: int = MAX_LINE) -> None:
        self._longest = longest
        self._rest = b""

    def cut(self, part: bytes) -> list[str]:
        """The lines that this part ends."""
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > self._longest:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode(errors="replace") for line in whole]

    def last(self) -> list[str]:
        """The last line, where the stream does not end it."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def lines_of(parts: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines as they come."""
    lines = WholeLines()
    for part in parts:
        yield from lines.cut(part)
    yield from lines.last()


async def coming_lines_of(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines as they come."""
    async for lines in line_batches_of(parts):
        for line in lines:
            yield line


async def line_batches_of(parts: AsyncIterator[bytes]) -> AsyncIterator[list[str]]:
    """Yield the lines that each part ends, none for a part without an end."""
    lines = WholeLines()
    async for part in parts:
        yield lines.cut(part)
    if last := lines.last():
        yield last
