"""Triton kernels of `ordered_sum`: read each rank's slice once, write the fp32 sum once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _pair(before, stride, inside):
    """The sum of the two rows behind `before`. One stride at a time: twice a stride may not fit 32 bits."""
    left = tl.load(before + stride, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(before + stride + stride, mask=inside, other=0.0).to(tl.float32)
    return left + right


@triton.jit
def _total(first, stride, inside, RANKS: tl.constexpr):
    """The sum over the rows of the elements at `first`, which lie in the first row."""
    total = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    if RANKS >= 2:
        first += stride
        total += tl.load(first, mask=inside, other=0.0).to(tl.float32)
    if RANKS >= 4:
        total += _pair(first, stride, inside)
    if RANKS == 8:
        first += stride
        first += stride
        third = _pair(first, stride, inside)
        first += stride
        first += stride
        total += third + _pair(first, stride, inside)
    return total


@triton.jit
def _sum_rows(rows, out, numel, stride, RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = _total(rows + at, stride, inside, RANKS)
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


@triton.jit
def _sum_lines(rows, out, squares, numel, stride, RANKS: tl.constexpr, ADD: tl.constexpr, LINE: tl.constexpr):
    """A program sums one line and squares it."""
    line = tl.program_id(0)
    at = line.to(tl.int64) * LINE + tl.arange(0, LINE)
    inside = at < numel
    total = _total(rows + at, stride, inside, RANKS)
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)
    # Read again, from the cache and as one row of a table: a load of its own, which hands the elements to the threads
    # as that of `line_squares` does, whatever the rows' dtype. The order of the additions follows from that.
    tl.debug_barrier()
    column = tl.arange(0, LINE)[None, :]
    written = tl.load(out + line.to(tl.int64) * LINE + column)
    tl.store(squares + line + tl.arange(0, 1), tl.sum(written * written, 1))


def sum_rows(rows: Sequence[Tensor], out: Tensor, add: bool) -> None:
    """Rows of one buffer, one behind the other, 1, 2, 4 or 8 of them; `out` fp32, as long as a row."""
    numel, stride = out.numel(), _stride(rows)
    grid = (triton.cdiv(numel, BLOCK),)
    _sum_rows[grid](
        rows[0], out, numel, stride, RANKS=len(rows), ADD=add, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
    )


def sum_rows_and_square(rows: Sequence[Tensor], out: Tensor, line: int, add: bool) -> Tensor:
    """The same, and the sum of squares of each line of `out`, which is whole lines: a power of two of elements."""
    numel, stride = out.numel(), _stride(rows)
    squares = out.new_empty(numel // line)
    _sum_lines[(squares.numel(),)](
        rows[0], out, squares, numel, stride, RANKS=len(rows), ADD=add, LINE=line, enable_fp_fusion=True, num_warps=1
    )
    return squares


def _stride(rows: Sequence[Tensor]) -> int:
    """From a row to the next one, in elements."""
    return int(rows[1].storage_offset() - rows[0].storage_offset()) if len(rows) > 1 else rows[0].numel()
