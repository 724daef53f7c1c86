"""Lists of copies: every byte once, of about equal size; writes of a push: every block once, the last one small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.core.handover.pieces import PIECE_BYTES, UNCUT_BYTES, pieces
from stoker.engine.transfer.device_memory import ALIGNED, LEAST_BYTES, Copy, dealt, merged

MIB = 1 << 20
ROW = st.integers(0, 40)
PLACES = st.lists(st.tuples(ROW, ROW), unique_by=(lambda place: place[0], lambda place: place[1]), max_size=30)


@given(
    PLACES,
    st.integers(1, 8),
    st.sampled_from([4096, 100_000, 9 * MIB, 50 * MIB]),
)
def test_lists_hold_every_byte_once(rows: list[tuple[int, int]], lanes: int, size: int) -> None:
    copies = [Copy(source * size, 10**12 + target * size, size) for source, target in rows]
    lists = dealt(merged(copies), lanes)
    assert len(lists) <= lanes
    found = [one for copies in lists for one in copies]
    assert merged(found) == merged(copies)  # in order, nothing left out and nothing twice
    sizes = [sum(copy.num_bytes for copy in copies) for copies in lists]
    assert all(sizes)
    for one in sizes[:-1]:
        assert LEAST_BYTES <= one <= max(sum(sizes) / lanes, LEAST_BYTES) + ALIGNED


@given(st.integers(0, 3000), st.sampled_from([1000, MIB, 9 * MIB, 300 * MIB]))
def test_writes_hold_every_block_once_and_end_small(count: int, block_bytes: int) -> None:
    found = list(pieces(count, block_bytes))
    assert [index for piece in found for index in range(count)[piece]] == list(range(count))
    sizes = [piece.stop - piece.start for piece in found]
    assert sizes == sorted(sizes, reverse=True) or sizes[-1] <= sizes[-2] + 1  # an odd rest is one block larger
    for blocks in sizes:
        assert blocks == 1 or blocks * block_bytes <= PIECE_BYTES
    if sizes:
        assert sizes[-1] == 1 or sizes[-1] * block_bytes <= UNCUT_BYTES
