"""Cells of blocks in a device's memory, as copies that its engines carry out: no kernel, and no room beside the blocks.

`cells` is the same in main memory, and the slow twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.engine.transfer.cells import CellBlocks, place_of
from stoker.engine.transfer.device_memory import CellCopy
from stoker.engine.transfer.layout import BlockLayout, Grid
from stoker.engine.transfer.local_blocks import MappableBlocks
from stoker.engine.transfer.port import Cells, Move


class DeviceCells(CellBlocks):
    """Blocks of a device cell by cell: number `block * cells + cell`."""

    def __init__(self, blocks: MappableBlocks, layout: BlockLayout, cells: Cells) -> None:
        grid = cells.cuts
        super().__init__(blocks, layout, grid)
        self._address, self._cut, self._size = blocks.address, cell_of(layout, grid), blocks.block_bytes
        self._starts = [start_of(layout, grid, cell) for cell in range(grid.cells)]
        self._joins = cells.joins

    def copies(self, moves: Sequence[Move], zone: int) -> Iterator[CellCopy]:
        """The copies of these cells into a zone at this address, whose slots are made of as large cells."""
        by_cell: dict[int, list[Move]] = {}
        for move in moves:
            by_cell.setdefault(move.local % len(self._starts), []).append(move)
        for cell, own in by_cell.items():
            for first, count in self._runs(own):
                yield self._copy(cell, first, count, zone)

    def _runs(self, moves: Sequence[Move]) -> Iterator[tuple[Move, int]]:
        """The first move and the length of each run of neighbours in blocks and slots; a cell in planes is alone."""
        step = len(self._starts), self._joins
        first, count = moves[0], 0
        for move in moves:
            expected = first.local + count * step[0], first.remote + count * step[1]
            if count and ((move.local, move.remote) != expected or self._cut.planes > 1):
                yield first, count
                first, count = move, 0
            count += 1
        yield first, count

    def _copy(self, cell: int, first: Move, count: int, zone: int) -> CellCopy:
        block = first.local // len(self._starts)
        source = self._address + block * self._size + self._starts[cell]
        copy = self._cut._replace(source=source, target=zone + first.remote * self.block_bytes)
        if count == 1:
            return copy
        return copy._replace(planes=count, plane_pitch=self._size, target_pitch=self._joins * self.block_bytes)


def cell_of(layout: BlockLayout, grid: Grid) -> CellCopy:
    """The form of a cell, with the longest rows: those that follow one another are one."""
    row_pitch = layout.num_heads * layout.head_dim * layout.item_bytes
    plane_pitch = row_pitch * layout.block_size
    planes, rows = layout.num_layers * 2 // grid.layers, layout.block_size // grid.tokens
    row_bytes = row_pitch // grid.heads
    if grid.heads == 1:  # the rows of a plane are one
        row_bytes, rows = row_bytes * rows, 1
    if rows == 1:
        row_pitch = plane_pitch
    if rows == 1 or grid.tokens == 1:  # planes follow one another like rows
        rows, planes, plane_pitch = rows * planes, 1, 0
    if row_bytes == row_pitch:
        row_bytes, rows, row_pitch = row_bytes * rows, 1, 0
    return CellCopy(0, 0, row_bytes, rows, row_pitch, planes, plane_pitch)


def start_of(layout: BlockLayout, grid: Grid, cell: int) -> int:
    """Bytes from the beginning of a block to that of a cell."""
    layers, heads, tokens = place_of(cell, grid)
    row_bytes = layout.num_heads * layout.head_dim * layout.item_bytes
    first_row = layers * (layout.num_layers // grid.layers) * 2 * layout.block_size
    first_row += tokens * (layout.block_size // grid.tokens)
    return first_row * row_bytes + heads * (row_bytes // grid.heads)
