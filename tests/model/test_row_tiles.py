"""Which weights are read in one wave, and by which tiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.model.kernels.fused.row_tiles import MIN_SPLIT_DEPTH, SHARED_BYTES, WAVE, RowTile, row_tile


@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "is_gated", "expected"),
    [
        (8, 4096, 14336, False, RowTile(16, 32, 256, 4, 6)),  # 8B: down
        (33, 4096, 14336, False, RowTile(64, 64, 256, 4, 3, 2)),
        (64, 4096, 4096, False, RowTile(64, 32, 256, 4, 4)),
        (65, 4096, 4096, False, None),
        (8, 14336, 4096, True, RowTile(16, 128, 128, 8, 3)),  # 8B: gate and up
        (65, 14336, 4096, True, RowTile(128, 128, 64, 8, 4)),
        (129, 14336, 4096, True, None),
        (8, 6144, 4096, False, None),  # 8B: q, k and v, one wave and a half
        (8, 1024, 3072, False, RowTile(16, 32, 256, 4, 6, 4)),  # 0.6B: down
        (32, 2048, 8192, False, RowTile(32, 64, 256, 4, 4, 4)),  # 1B: down
        (4, 3072, 1024, True, None),  # 0.6B: gate and up
        (100, 3584, 4096, True, None),
    ],
)
def test_the_weights_of_known_models(
    rows: int, outputs: int, depth: int, is_gated: bool, expected: RowTile | None
) -> None:
    assert row_tile(rows, outputs, depth, is_gated) == expected


@given(st.integers(1, 200), st.integers(1, 40_000), st.integers(1, 40_000), st.booleans())
def test_every_tile_is_one_wave_that_fits(rows: int, outputs: int, depth: int, is_gated: bool) -> None:
    tile = row_tile(rows, outputs, depth, is_gated)
    if tile is None:
        return
    assert tile.rows >= rows
    assert -(-outputs // tile.outputs) * tile.splits in WAVE
    assert depth >= tile.splits * MIN_SPLIT_DEPTH
    assert 2 * tile.stages * tile.columns * (tile.rows + tile.outputs * (1 + is_gated)) <= SHARED_BYTES
    assert tile.splits == 1 or not is_gated
