"""Which files are a whole block: the quick way against counting."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.transfer.block_part import BlockPart, tiling

WHOLE = BlockPart(0, 3, 0, 4)


def _part(layers: tuple[int, int], heads: tuple[int, int]) -> BlockPart:
    return BlockPart(min(layers), max(layers) + 1, min(heads), max(heads) + 1)


PART = st.builds(_part, st.tuples(*[st.integers(0, 2)] * 2), st.tuples(*[st.integers(0, 3)] * 2))


def counts(parts: tuple[BlockPart, ...]) -> np.ndarray:
    """[layers, heads]: how many parts hold each."""
    held = np.zeros((WHOLE.end_layer, WHOLE.end_head), dtype=np.int64)
    for part in parts:
        held[part.first_layer : part.end_layer, part.first_head : part.end_head] += 1
    return held


def any_tiling(parts: frozenset[BlockPart]) -> bool:
    """Try all subsets."""
    subsets = chain.from_iterable(combinations(parts, size) for size in range(1, len(parts) + 1))
    return any((counts(subset) == 1).all() for subset in subsets)


@given(parts=st.frozensets(PART, max_size=9))
def test_parts_are_a_block_if_some_of_them_hold_every_place_once(parts: frozenset[BlockPart]) -> None:
    found = tiling(parts, WHOLE)
    assert (found is not None) == any_tiling(parts)
    if found is not None:
        assert set(found) <= parts
        assert (counts(found) == 1).all()


def test_parts_of_many_ranks_are_told_apart_in_time() -> None:
    """Nearly all parts of 8 x 8 ranks and of 4 x 8: every way ends at the missing corner."""
    whole = BlockPart(0, 64, 0, 8)
    parts = {
        BlockPart(8 * stage, 8 * stage + 8, width * rank, width * rank + width)
        for stage in range(8)
        for width in (1, 2)
        for rank in range(8 // width)
    }
    last = [one for one in parts if one.end_layer == 64 and one.end_head == 8]
    assert tiling(frozenset(parts - {*last}), whole) is None
    found = tiling(frozenset(parts), whole)
    assert found is not None
    assert len(found) == 32, "the larger ones"


def test_parts_beyond_the_block_are_left_out() -> None:
    assert tiling(frozenset({BlockPart(0, 4, 0, 4)}), WHOLE) is None
    assert tiling(frozenset({BlockPart(0, 4, 0, 4), WHOLE}), WHOLE) == (WHOLE,)
