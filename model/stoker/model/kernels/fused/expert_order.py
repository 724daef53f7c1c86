"""The order of rows in which experts compute, made in one kernel: each program collects the rows of one expert.

Choices of experts that are not held here have no row. Nothing waits for the device. T tokens, K experts of a token, e
experts that are held here, S = T * K. The twin is `expert_rows.sort_rows`.

Called by `expert_layer`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last

BLOCK = 4096
"""Choices that a program looks at at once."""


class RowOrder(NamedTuple):
    """Rows sorted by expert; within an expert in the order of the tokens."""

    sources: Tensor
    """int32 [S]: the choice, a place in the flattened [T * K], of each row. Undefined behind the last end."""
    ends: Tensor
    """int32 [e]: where the run of rows of each expert ends."""


def order_rows(experts_TK: Tensor, num_own: int, first: int = 0) -> RowOrder:
    """Sort the choices (int32) of `num_own` experts from `first` on by expert."""
    num_rows, device = experts_TK.numel(), experts_TK.device
    order = RowOrder(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_own, dtype=torch.int32, device=device),
    )
    block = min(BLOCK, max(16, triton.next_power_of_2(num_rows)))
    order_kernel[(num_own,)](
        experts_TK,
        order.sources,
        order.ends,
        num_rows,
        first,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        **overlap(),
    )
    return order


@triton.jit(do_not_specialize=["num_rows"])
def order_kernel(experts, sources, ends, num_rows, first, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_last(OVERLAPS)
    expert = first + tl.program_id(0)
    choice = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, num_rows, BLOCK):
        chosen = tl.load(experts + begin + choice, mask=begin + choice < num_rows, other=2147483647)
        lower += ((chosen >= first) & (chosen < expert)).to(tl.int32)
    place = tl.sum(lower, 0)
    for begin in range(0, num_rows, BLOCK):
        chosen = tl.load(experts + begin + choice, mask=begin + choice < num_rows, other=2147483647)
        is_own = chosen == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(sources + place + rank - 1, begin + choice, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    tl.store(ends + tl.program_id(0), place)
