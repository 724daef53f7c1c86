"""Triton kernel of `ordered_sum`: reads each rank's slice once, writes the fp32 sum once."""

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
def _sum_rows(rows, out, numel, stride, RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    first = rows + at
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
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


def sum_rows(rows: Sequence[Tensor], out: Tensor, add: bool) -> None:
    """Rows of one buffer, one behind the other, 1, 2, 4 or 8 of them; `out` fp32, as long as a row."""
    numel = out.numel()
    stride = rows[1].storage_offset() - rows[0].storage_offset() if len(rows) > 1 else numel
    grid = (triton.cdiv(numel, BLOCK),)
    _sum_rows[grid](
        rows[0], out, numel, stride, RANKS=len(rows), ADD=add, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
    )
