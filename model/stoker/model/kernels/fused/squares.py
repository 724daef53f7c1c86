"""Sums of squares of flat buffers in a fixed order, left on the device.

Called through `Ops`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 65536
"""Elements whose sum is one partial sum."""
BLOCK = 8192


def line_squares(flat: Tensor, line: int) -> Tensor:
    result = torch.empty(flat.numel() // line, dtype=torch.float32, device=flat.device)
    if result.numel():
        line_kernel[(result.numel(),)](
            flat, result, line, BLOCK=triton.next_power_of_2(line), enable_fp_fusion=True, num_warps=1
        )
    return result


def sum_of_squares(flat: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    runs = triton.cdiv(flat.numel(), RUN)
    if runs:
        partial = torch.empty(runs, dtype=torch.float64, device=flat.device)
        run_kernel[(runs,)](flat, partial, flat.numel(), RUN=RUN, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8)
        total_kernel[(1,)](partial, total, runs, BLOCK=1024, enable_fp_fusion=True, num_warps=4)
    return total


@triton.jit
def line_kernel(flat, result, line, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(flat + row * line + column, mask=column < line, other=0.0).to(tl.float32)
    tl.store(result + row, tl.sum(values * values, 0))


@triton.jit
def run_kernel(flat, partial, size, RUN: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * RUN
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for offset in range(0, RUN, BLOCK):
        place = begin + offset + tl.arange(0, BLOCK)
        values = tl.load(flat + place, mask=place < size, other=0.0).to(tl.float32)
        squares += values * values
    tl.store(partial + tl.program_id(0), tl.sum(squares.to(tl.float64), 0))


@triton.jit
def total_kernel(partial, total, size, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        sums += tl.load(partial + place, mask=place < size, other=0.0)
    tl.store(total, tl.sum(sums, 0))
