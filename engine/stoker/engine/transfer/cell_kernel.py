"""Cells of blocks on a device: joined into blocks and summed by a Triton kernel, and the same in plain torch.

A slot has its cells one after the other; in a block they are runs of layers, heads and tokens (`layout.Grid`). `cells`
is the same in main memory. Blocks that are not cut have a kernel of their own (`checksum_kernel`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.engine.transfer.checksum import COLUMNS, num_rows
from stoker.engine.transfer.checksum_kernel import RUN, TILE, keys, torch_sums
from stoker.engine.transfer.layout import BlockLayout, Grid


class CellShape(NamedTuple):
    """A block and its cells in words of 32 bits."""

    grid: Grid
    planes: int
    """Of a cell: keys and values of each of its layers."""
    tokens: int
    """Of a cell."""
    row_words: int
    """A token's heads of a cell, in one plane."""

    @property
    def words(self) -> int:
        """Of a cell."""
        return self.planes * self.tokens * self.row_words

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[runs of layers, planes, runs of tokens, tokens, runs of heads, row_words]."""
        layers, heads, tokens = self.grid
        return layers, self.planes, tokens, self.tokens, heads, self.row_words


def shape_of(layout: BlockLayout, grid: Grid) -> CellShape:
    """The shape of a block's cells. Raises ValueError: their rows are not whole words."""
    row_bytes = layout.num_heads // grid.heads * layout.head_dim * layout.item_bytes
    if row_bytes % 4:
        raise ValueError(f"a token's heads of a cell must have a multiple of 4 bytes, got {row_bytes}")
    return CellShape(grid, layout.num_layers * 2 // grid.layers, layout.block_size // grid.tokens, row_bytes // 4)


def join_cells(
    slots_SN: Tensor, slots_B: Tensor, cache_TN: Tensor, blocks_B: Tensor, sums_S: Tensor, shape: CellShape
) -> None:  # fmt: skip
    """Fill blocks from slots, and add the raw sum of each cell that was stored to `sums_S`, [B x cells].

    Rows are contiguous bytes; `slots_B`, `blocks_B` and `sums_S` are int64 on the same device.
    """
    _launch(slots_SN, slots_B, cache_TN, blocks_B, sums_S, shape, copies=True)


def sum_cells(cache_TN: Tensor, blocks_B: Tensor, sums_S: Tensor, shape: CellShape) -> None:
    """Add the raw sum of each cell of blocks to `sums_S`, [B x cells]; nothing is copied."""
    _launch(cache_TN, blocks_B, cache_TN, blocks_B, sums_S, shape, copies=False)


def torch_join_cells(
    slots_SN: Tensor, slots_B: Tensor, cache_TN: Tensor, blocks_B: Tensor, sums_S: Tensor, shape: CellShape
) -> None:  # fmt: skip
    """`join_cells` in plain torch; the slow twin, and the way without Triton."""
    cells = _cells_of(cache_TN, shape)
    cells[blocks_B] = slots_SN.index_select(0, slots_B).view(torch.int32).view(-1, *cells.shape[1:])
    torch_sum_cells(cache_TN, blocks_B, sums_S, shape)


def torch_sum_cells(cache_TN: Tensor, blocks_B: Tensor, sums_S: Tensor, shape: CellShape) -> None:
    """`sum_cells` in plain torch."""
    rows_SN = _cells_of(cache_TN, shape)[blocks_B].reshape(-1, shape.words).view(torch.uint8)
    torch_sums(rows_SN, torch.arange(len(rows_SN), device=rows_SN.device), sums_S)


def _cells_of(cache_TN: Tensor, shape: CellShape) -> Tensor:
    """[blocks, runs of layers, of heads, of tokens, planes, tokens, row_words] int32: a view."""
    return cache_TN.view(torch.int32).view(-1, *shape.block_shape).permute(0, 1, 5, 3, 2, 4, 6)


def _launch(
    slots_SN: Tensor, slots_B: Tensor, cache_TN: Tensor, blocks_B: Tensor, sums_S: Tensor, shape: CellShape, *,
    copies: bool,
) -> None:  # fmt: skip
    rows, cells = num_rows(shape.words), shape.grid.cells
    if len(blocks_B):
        columns_C, rows_R = keys(rows, cache_TN.device)
        cell_kernel[(len(blocks_B) * cells, triton.cdiv(rows, RUN))](
            slots_SN.view(torch.int32), slots_B, cache_TN.view(torch.int32), blocks_B, columns_C, rows_R, sums_S,
            shape.words, rows, cells, shape.grid.heads, shape.grid.tokens, shape.planes, shape.tokens, shape.row_words,
            COPIES=copies, COLUMNS=COLUMNS, TILE=TILE, RUN=RUN, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["words", "rows", "cells", "head_runs", "token_runs", "planes", "tokens", "row_words"])
def cell_kernel(
    source, slots, target, blocks, columns, row_keys, sums, words, rows,
    cells, head_runs, token_runs, planes, tokens, row_words,
    COPIES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    task, program = tl.program_id(0), tl.program_id(1)
    number, cell = task // cells, task % cells
    others, token_run = cell // token_runs, cell % token_runs
    layer_run, head_run = others // head_runs, others % head_runs
    token_words = row_words * head_runs
    plane_words = token_words * tokens * token_runs
    first = (layer_run * planes * token_runs + token_run) * tokens * token_words + head_run * row_words
    begin = target + tl.load(blocks + number) * words * cells + first
    packed = source + (tl.load(slots + number) * cells + cell) * words
    column = tl.arange(0, COLUMNS)
    column_key = tl.load(columns + column)
    total = tl.zeros([TILE], dtype=tl.int64)
    for turn in range(0, RUN, TILE):
        row = program * RUN + turn + tl.arange(0, TILE)
        place = row[:, None] * COLUMNS + column[None, :]
        inside = place < words
        line = place // row_words
        offset = (line // tokens) * plane_words + (line % tokens) * token_words + place % row_words
        if COPIES:
            value = tl.load(packed + place, mask=inside, other=0)
            tl.store(begin + offset, value, mask=inside)
        else:
            value = tl.load(begin + offset, mask=inside, other=0)
        wide = value.to(tl.int64) & 0xFFFFFFFF
        row_key = tl.load(row_keys + row, mask=row < rows, other=0)
        total += tl.sum(wide * column_key[None, :], 1) * row_key
    tl.atomic_add(sums + task, tl.sum(total, 0), sem="relaxed")  # modulo 2^64, so in any order
