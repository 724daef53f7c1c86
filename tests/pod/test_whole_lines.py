"""Lines of streams: whole however they are cut, and ended by line feeds alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from stoker.pod.whole_lines import WholeLines, coming_lines_of, lines_of

TEXT = "eins\nzwei ä\n\n 10%\r 20%\u2028 30%\x85\ndrei"
LINES = ["eins", "zwei ä", "", " 10%\r 20%\u2028 30%\x85", "drei"]


def test_lines_are_whole_however_the_stream_is_cut() -> None:
    data = TEXT.encode()
    for size in range(1, len(data)):
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert list(lines_of(iter(parts))) == LINES
        assert asyncio.run(_coming(parts)) == LINES


async def _coming(parts: list[bytes]) -> list[str]:
    async def come() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return [line async for line in coming_lines_of(come())]


def test_a_line_without_an_end_takes_no_memory_without_an_end() -> None:
    lines = WholeLines(longest=4)
    assert lines.cut(b"abc") == []
    assert lines.cut(b"de") == ["abcde"]
    assert (lines.cut(b"f\n"), lines.last()) == (["f"], [])
