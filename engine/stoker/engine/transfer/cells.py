"""Cells of blocks in main memory: equal runs of heads, cut out of blocks and joined into them.

The bytes are moved, never converted. `repack` is the slow twin, for any two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import LocalBlocks


def cell_rows(layout: BlockLayout, data_N: np.ndarray, cells: int) -> np.ndarray:
    """[cells, rows, row_bytes]: a block's cells, a view. A row is a token's heads of one cell in one layer."""
    rows = layout.num_layers * 2 * layout.block_size
    view: np.ndarray = data_N.reshape(rows, cells, -1).swapaxes(0, 1)
    return view


class CellBlocks:
    """Blocks as links read them cell by cell: number `block * cells + cell`."""

    def __init__(self, blocks: LocalBlocks, layout: BlockLayout, cells: int) -> None:
        self._blocks, self._layout, self._cells = blocks, layout, cells
        self.count, self.block_bytes = blocks.count * cells, blocks.block_bytes // cells

    def mark(self) -> None:
        return None

    def read(self, blocks: Sequence[int], after: object) -> Iterator[np.ndarray]:  # noqa: ARG002 - main memory
        whole = self._blocks.read([number // self._cells for number in blocks], None)
        for number, data_N in zip(blocks, whole, strict=True):
            rows = cell_rows(self._layout, data_N, self._cells)[number % self._cells]
            yield np.ascontiguousarray(rows).reshape(-1)


def join_cells(layout: BlockLayout, slot_N: np.ndarray, block_N: np.ndarray, cells: int) -> None:
    """Fill a block from a slot in which its cells lie one after the other."""
    rows = cell_rows(layout, block_N, cells)
    rows[:] = slot_N.reshape(rows.shape)


def cell_sums(layout: BlockLayout, block_N: np.ndarray, cells: int) -> list[int]:
    """The raw sum of each cell of a block."""
    if cells == 1:
        return [int(raw_sums(block_N[None])[0])]
    rows = np.ascontiguousarray(cell_rows(layout, block_N, cells))
    return [int(one) for one in raw_sums(rows.reshape(cells, -1))]
