"""Tiles of products of several rows, and the weights that they are for. Pure.

A weight is read in one wave: one program for nearly every multiprocessor, which all finish together, each with as many
bytes on their way as its memory holds. A weight that cannot be dealt out so is read as fast by cuBLAS.
`bench/gpu/rows_search.py` times the candidates.

Called by `several_rows`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class RowTile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    outputs: int
    """Of gate, and as many of up."""
    columns: int
    warps: int
    stages: int
    splits: int = 1
    """Parts of the depth; each is the work of a program."""


class Cut(NamedTuple):
    """A program's part of a weight."""

    outputs: int
    splits: int


MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
WAVE = range(110, MULTIPROCESSORS + 1)
"""Programs of one wave."""
SHARED_BYTES = 220 * 1024
"""Of a multiprocessor, for operands on their way."""
OUTPUTS = (128, 64, 32)
SPLITS = (1, 2, 4)
MIN_SPLIT_DEPTH = 512
COLUMNS = (256, 128, 64)
STAGES = (6, 4, 3)
FEWEST_ROWS = 16
"""The tensor cores' results have at least so many columns."""
MANY_ROWS = 64
"""Where rows are more, only gate and up are worth it: SwiGLU needs no pass of its own."""
MOST_ROWS = 128
DEEP = 7168
"""Depth from which on MANY_ROWS rows are worth a split: every program reads all of them, so there shall be fewer that
share outputs."""


@functools.cache
def row_tile(num_rows: int, num_outputs: int, depth: int, is_gated: bool) -> RowTile | None:
    """Return the tile for operands of 16 bits that was fastest on an H200; None where cuBLAS was.

    `num_outputs`: of gate, where the product is gated.
    """
    if num_rows > (MOST_ROWS if is_gated else MANY_ROWS):
        return None
    rows = max(FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
    cut = one_wave(rows, num_outputs, depth, is_gated)
    return None if cut is None else staged(rows, cut, is_gated)


def one_wave(rows: int, num_outputs: int, depth: int, is_gated: bool) -> Cut | None:
    """Return a cut of the weight into one wave of programs, of whole depth if there is one; None: there is none."""
    all_cuts = [Cut(outputs, splits) for outputs in OUTPUTS for splits in SPLITS]
    cuts = [cut for cut in all_cuts if suits(cut, rows, num_outputs, depth, is_gated)]
    splits_pay = rows == MANY_ROWS and depth >= DEEP
    return min(cuts, key=lambda cut: (cut.splits > 1 and not splits_pay, -cut.outputs), default=None)


def suits(cut: Cut, rows: int, num_outputs: int, depth: int, is_gated: bool) -> bool:
    if is_gated:
        able = cut.splits == 1 and (rows <= MANY_ROWS or cut.outputs > OUTPUTS[-1])
    else:
        able = cut.outputs < OUTPUTS[0]
    programs = -(-num_outputs // cut.outputs) * cut.splits
    return able and programs in WAVE and depth >= cut.splits * MIN_SPLIT_DEPTH


def staged(rows: int, cut: Cut, is_gated: bool) -> RowTile:
    """Return the tile with the widest columns that leave room for enough stages, and with the most stages."""
    widths = {columns: 2 * columns * (rows + cut.outputs * (2 if is_gated else 1)) for columns in COLUMNS}
    columns = next(columns for columns, width in widths.items() if STAGES[-1] * width <= SHARED_BYTES)
    stages = next(stages for stages in STAGES if stages * widths[columns] <= SHARED_BYTES)
    return RowTile(rows, cut.outputs, columns, 8 if cut.outputs == OUTPUTS[0] else 4, stages, cut.splits)
