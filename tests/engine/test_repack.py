"""Blocks of other widths and sizes hold the same numbers after repacking; compared with a copy cell by cell."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.repack import pieces, repack

WHOLE = BlockLayout(
    first_layer=0, end_layer=4, block_size=2, first_head=0, end_head=4, head_dim=3, dtype="bfloat16"
)  # fmt: skip
TOKENS = 24


def ranks(pipeline: int, tensor: int, block_size: int) -> list[BlockLayout]:
    """The layouts of all ranks of an engine."""
    layers, heads = WHOLE.num_layers // pipeline, WHOLE.num_heads // tensor
    return [
        replace(
            WHOLE, block_size=block_size,
            first_layer=stage * layers, end_layer=(stage + 1) * layers,
            first_head=rank * heads, end_head=(rank + 1) * heads,
        )
        for stage, rank in product(range(pipeline), range(tensor))
    ]  # fmt: skip


def blocks_by_cell(layout: BlockLayout) -> dict[int, np.ndarray]:
    """The rank's blocks of one request, cell by cell: each number names its layer, kind, token, head and place."""
    blocks = {}
    for index in range(TOKENS // layout.block_size):
        block = np.zeros(layout.shape, dtype=np.uint16)
        for layer, kind, token, head, place in np.ndindex(*layout.shape):
            cell = (
                layout.first_layer + layer, kind, index * layout.block_size + token, layout.first_head + head, place,
            )  # fmt: skip
            block[layer, kind, token, head, place] = np.ravel_multi_index(cell, (4, 2, TOKENS, 4, 3))
        blocks[index] = block.reshape(-1).view(np.uint8)
    return blocks


sizes = st.sampled_from([1, 2, 3, 4, 8])
widths = st.sampled_from([1, 2, 4])


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(widths, widths, sizes, widths, widths, sizes)
def test_every_rank_gets_its_cells(pp: int, tp: int, size: int, to_pp: int, to_tp: int, to_size: int) -> None:
    sources = [(layout, blocks_by_cell(layout)) for layout in ranks(pp, tp, size)]
    for target in ranks(to_pp, to_tp, to_size):
        expected = blocks_by_cell(target)
        blocks = {index: np.zeros_like(block) for index, block in expected.items()}
        repack(sources, target, blocks)
        assert all(np.array_equal(blocks[index], expected[index]) for index in expected)


def test_only_the_requested_blocks_are_read_and_written() -> None:
    (source,), (target,) = ranks(1, 1, 8), ranks(1, 1, 2)
    held = {1: blocks_by_cell(source)[1]}
    expected = blocks_by_cell(target)
    blocks = {index: np.zeros_like(expected[index]) for index in (4, 7)}
    repack([(source, held)], target, blocks)
    assert all(np.array_equal(blocks[index], expected[index]) for index in blocks)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([replace(WHOLE, dtype="float16")], "dtype is 'bfloat16' here and 'float16'"),
        ([replace(WHOLE, head_dim=8)], "head_dim is 3 here and 8"),
        ([replace(WHOLE, end_head=3)], "ranks with layer 0, head 3 is 1 here and 0"),
        ([replace(WHOLE, end_layer=2), replace(WHOLE, first_layer=3)], "ranks with layer 2, head 0 is 1 here and 0"),
        ([WHOLE, replace(WHOLE, first_head=2)], "ranks with layer 0, head 2 is 1 here and 2"),
    ],
)
def test_sources_that_do_not_make_up_the_target_are_refused(sources: list[BlockLayout], message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        list(pieces(sources, WHOLE, range(1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "int4"}, "dtype must be one of"), ({"end_layer": 0}, "layers must be at least 1")],
)
def test_a_layout_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WHOLE, **change)  # type: ignore[arg-type]
