"""Triton kernel of `ordered_sum`: reads each rank's slice once, writes the fp32 sum once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(rows, out, numel, stride, RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    if RANKS >= 2:
        total += tl.load(rows + stride + at, mask=inside, other=0.0).to(tl.float32)
    if RANKS >= 4:
        second = tl.load(rows + 2 * stride + at, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(rows + 3 * stride + at, mask=inside, other=0.0).to(tl.float32)
        total += second
    if RANKS == 8:
        third = tl.load(rows + 4 * stride + at, mask=inside, other=0.0).to(tl.float32)
        third += tl.load(rows + 5 * stride + at, mask=inside, other=0.0).to(tl.float32)
        fourth = tl.load(rows + 6 * stride + at, mask=inside, other=0.0).to(tl.float32)
        fourth += tl.load(rows + 7 * stride + at, mask=inside, other=0.0).to(tl.float32)
        total += third + fourth
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


def sum_rows(rows: Sequence[Tensor], out: Tensor, add: bool) -> None:
    """Rows of one buffer, one behind the other, 1, 2, 4 or 8 of them; `out` fp32, as long as a row."""
    numel = out.numel()
    stride = rows[1].storage_offset() - rows[0].storage_offset() if len(rows) > 1 else numel
    grid = (triton.cdiv(numel, BLOCK),)
    _sum_rows[grid](rows[0], out, numel, stride, RANKS=len(rows), ADD=add, BLOCK=BLOCK, num_warps=8)
