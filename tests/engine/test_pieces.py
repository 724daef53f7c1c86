"""How a push is cut into writes: every block once, the last ones small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.core.handover.pieces import PIECE_BYTES, UNCUT_BYTES, pieces

MIB = 1 << 20


@given(st.integers(0, 3000), st.sampled_from([1000, MIB, 9 * MIB, 300 * MIB]))
def test_writes_hold_every_block_once_and_end_small(count: int, block_bytes: int) -> None:
    found = list(pieces(count, block_bytes, ends=True))
    assert [index for piece in found for index in range(count)[piece]] == list(range(count))
    sizes = [piece.stop - piece.start for piece in found]
    assert sizes == sorted(sizes, reverse=True) or sizes[-1] <= sizes[-2] + 1  # an odd rest is one block larger
    for blocks in sizes:
        assert blocks == 1 or blocks * block_bytes <= PIECE_BYTES
    if sizes:
        assert sizes[-1] == 1 or sizes[-1] * block_bytes <= UNCUT_BYTES


@given(st.integers(1, 3000), st.sampled_from([1000, MIB, 9 * MIB, 300 * MIB]))
def test_writes_before_the_end_of_a_request_are_as_few_as_may_be(count: int, block_bytes: int) -> None:
    found = list(pieces(count, block_bytes, ends=False))
    assert [index for piece in found for index in range(count)[piece]] == list(range(count))
    assert len(found) == -(-count // max(PIECE_BYTES // block_bytes, 1))
