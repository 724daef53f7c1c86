"""How the blocks of one push are cut into writes. Pure.

A receiver copies and sums a piece while the next one is on its way, so what it does behind the last byte is the last
piece's: the last ones of a request are small. Each write costs a message each way, so all others are large.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE_BYTES = 256 << 20
"""Most bytes of one write."""
UNCUT_BYTES = 208 << 20
"""Most bytes of a request's end that are not cut further: a smaller copy takes less time than the receiver's work for
it, 0.4 ms."""


def pieces(count: int, block_bytes: int, *, ends: bool) -> Iterator[slice]:
    """Cut `count` blocks into writes as large as allowed. `ends`: they are the last of their request, of which the last
    writes are half of what is left each time."""
    most, uncut = (max(size // block_bytes, 1) for size in (PIECE_BYTES, UNCUT_BYTES))
    begin = 0
    while begin < count:
        left = count - begin
        size = min(most, left // 2) if ends and left > uncut else min(most, left)
        yield slice(begin, begin + size)
        begin += size
