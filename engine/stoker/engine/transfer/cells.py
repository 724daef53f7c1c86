"""Cells of blocks in main memory: equal runs of layers, heads and tokens, cut out of blocks and joined into them.

The bytes are moved, never converted. `repack` is the slow twin, for any two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.local_blocks import LocalBlocks


def cell_rows(layout: BlockLayout, data_N: np.ndarray, grid: Grid) -> np.ndarray:
    """[grid.layers, grid.heads, grid.tokens, layers x 2, tokens, row_bytes]: a block's cells, a view.

    A row is a token's heads of one cell in one layer.
    """
    layers, tokens = layout.num_layers // grid.layers * 2, layout.block_size // grid.tokens
    return data_N.reshape(grid.layers, layers, grid.tokens, tokens, grid.heads, -1).transpose(0, 4, 2, 1, 3, 5)


def place_of(cell: int, grid: Grid) -> tuple[int, int, int]:
    """Runs of layers, heads and tokens of a cell."""
    others, tokens = divmod(cell, grid.tokens)
    return (*divmod(others, grid.heads), tokens)


class CellBlocks:
    """Blocks as links read them cell by cell: number `block * cells + cell`."""

    def __init__(self, blocks: LocalBlocks, layout: BlockLayout, grid: Grid) -> None:
        self._blocks, self._layout, self._grid = blocks, layout, grid
        self.count, self.block_bytes = blocks.count * grid.cells, blocks.block_bytes // grid.cells

    def read(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        """Each cell's bytes; a block is read once for neighbours that are in it."""
        cells = self._grid.cells
        runs = [(block, list(numbers)) for block, numbers in groupby(blocks, lambda number: number // cells)]
        whole = self._blocks.read([block for block, _ in runs])
        for (_, numbers), data_N in zip(runs, whole, strict=True):
            rows = cell_rows(self._layout, data_N, self._grid)
            for number in numbers:
                yield np.ascontiguousarray(rows[place_of(number % cells, self._grid)]).reshape(-1)


def join_cells(layout: BlockLayout, slot_N: np.ndarray, block_N: np.ndarray, grid: Grid) -> None:
    """Fill a block from a slot in which its cells lie one after the other."""
    rows = cell_rows(layout, block_N, grid)
    rows[:] = slot_N.reshape(rows.shape)


def cell_sums(layout: BlockLayout, block_N: np.ndarray, grid: Grid) -> list[int]:
    """The raw sum of each cell of a block."""
    if grid == ONE_CELL:
        return [int(raw_sums(block_N[None])[0])]
    rows = np.ascontiguousarray(cell_rows(layout, block_N, grid))
    return [int(one) for one in raw_sums(rows.reshape(grid.cells, -1))]
