"""Log-probabilities in float32, one program per row: the running maximum and sum, then the result. V vocabulary.

Called through `Ops`, and by `cross_entropy`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.norm import wants_grad

BLOCK = 4096
"""Columns that a program takes at once."""


def log_softmax(logits_TV: Tensor) -> Tensor:
    if wants_grad(logits_TV):
        return torch.log_softmax(logits_TV.float(), -1)
    logits = logits_TV.reshape(-1, logits_TV.shape[-1])
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    result = torch.empty(logits_TV.shape, dtype=torch.float32, device=logits.device)
    if result.numel():
        log_softmax_kernel[(logits.shape[0],)](
            logits, result, logits.stride(0), logits.shape[1], BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
        )
    return result


@triton.jit
def row_statistics(row, columns, BLOCK: tl.constexpr):
    """Maximum of a row of logits and the sum of exp(logit - maximum), float32. `row` points to its first element."""
    biggest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        values = tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(biggest, values)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(biggest - shift) + tl.exp(values - shift)
        biggest = larger
    row_biggest = tl.max(biggest, 0)
    return row_biggest, tl.sum(total * tl.exp(biggest - row_biggest), 0)


@triton.jit
def log_softmax_kernel(logits, result, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    biggest, total = row_statistics(logits + row * stride, columns, BLOCK)
    shift = biggest + tl.log(total)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        values = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + row * columns + column, values - shift, mask=inside)
