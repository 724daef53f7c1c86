"""Output layer and cross entropy: large products by cuBLAS (or the deterministic product), the softmax and its gradient
by one kernel in place.

Logits live for one chunk of tokens. Gradients are made in the forward pass, backward multiplies them by the loss's
gradient where that is not one. T tokens, n tokens of a chunk, D hidden, V this rank's vocabulary rows.

Called through `Ops` by the trainer's step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.fused.linear import Product
from stoker.model.kernels.fused.log_softmax import row_statistics
from stoker.model.kernels.grad_destination import GradDestination, grad_destination

CHUNK_BYTES = 2200 * 2**20
"""Logits of one chunk: 8,192 rows of 128,256 in bfloat16. Large, because each further chunk adds to the weight's
gradient in memory.
"""
ROW_MULTIPLE = 128
BLOCK = 4096


def chunked_cross_entropy(
    product: Product,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    first_token: int,
    group: ProcessGroup | None,
    chunk_bytes: int = CHUNK_BYTES,
    most_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, num_targets, logprobs_T). `product(a_nd, b_ed)` is a @ b^T.

    `most_rows`: V of the rank that has most (default: of this one), by which all ranks cut the same chunks.

    Tokens of weight 0 are left out; any other whose target is no token of the whole table has the logprob NaN, and so
    has the loss. Where `weights_T` lies on the host this needs no wait for the device; on the device it is one wait.
    """
    device = hidden_TD.device
    wants_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    counted = weights_T.nonzero().squeeze(1).to(device, non_blocking=True)
    targets, weights = targets_T.to(device, non_blocking=True), weights_T.to(device, non_blocking=True).float()
    is_whole = len(counted) == len(weights)
    chosen = (
        (hidden_TD, targets, weights)
        if is_whole
        else tuple(x.index_select(0, counted) for x in (hidden_TD, targets, weights))
    )
    chunk_tokens = chunk_bytes // (hidden_TD.dtype.itemsize * (most_rows or weight_VD.shape[0]))
    loss_sum, logprobs = ChunkedCrossEntropy.apply(
        *chosen[:1], weight_VD, *chosen[1:], product, first_token, group, wants_grad, chunk_tokens
    )
    return loss_sum, weights.sum(), logprobs if is_whole else torch.zeros_like(weights).index_copy(0, counted, logprobs)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Forward makes the gradients of loss_sum; backward only scales them, in place, and so can run once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        product: Product,
        first_token: int,
        group: ProcessGroup | None,
        wants_grad: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        hidden_TD = hidden_TD.contiguous()
        logprobs_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        grad_hidden = torch.empty_like(hidden_TD) if wants_grad else None
        grad_weight: Tensor | None = None
        ctx.destination = grad_destination(weight_VD)
        chunks = slices(hidden_TD.shape[0], chunk_tokens)
        for chunk in chunks:
            logits = product(hidden_TD[chunk], weight_VD)
            softmax_in_place(
                logits, targets_T[chunk], weights_T[chunk], logprobs_T[chunk], first_token, group, wants_grad
            )
            if grad_hidden is not None:  # the logits are their gradient now
                torch.mm(logits, weight_VD, out=grad_hidden[chunk])
                if ctx.needs_input_grad[1]:
                    grad_weight = add_product(grad_weight, logits, hidden_TD[chunk], is_only=len(chunks) == 1)
        if grad_hidden is not None:
            if group is not None:
                dist.all_reduce(grad_hidden, group=group)  # over tp: each rank's vocabulary gave a part of the sum
            if grad_weight is None and ctx.needs_input_grad[1]:  # no token counts
                grad_weight = torch.zeros_like(weight_VD)
            ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(logprobs_T)
        return -(logprobs_T.double() * weights_T).sum().float(), logprobs_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("cross_entropy: backward ran before; its gradients were scaled in place and are gone")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return (
            scale_(grad_hidden, grad_loss) if needs_hidden else None,
            scaled_weight_gradient(grad_weight, grad_loss, ctx.destination) if needs_weight else None,
            *(None,) * 7,
        )


def add_product(total: Tensor | None, grad_nV: Tensor, hidden_nD: Tensor, is_only: bool) -> Tensor:
    """Return total + grad^T @ hidden. The sum over several chunks is float32."""
    if is_only:
        return grad_nV.t() @ hidden_nD
    if grad_nV.dtype is torch.float32:
        return grad_nV.t() @ hidden_nD if total is None else total.addmm_(grad_nV.t(), hidden_nD)
    if total is None:
        return torch.mm(grad_nV.t(), hidden_nD, out_dtype=torch.float32)
    return torch.addmm(total, grad_nV.t(), hidden_nD, out_dtype=torch.float32)


def slices(total: int, rows: int) -> list[slice]:
    """Return runs of about equal length, a multiple of ROW_MULTIPLE, of at most `rows` (or of one multiple)."""
    rows = max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)
    count = triton.cdiv(total, rows)
    each = triton.cdiv(triton.cdiv(total, max(count, 1)), ROW_MULTIPLE) * ROW_MULTIPLE
    return [slice(begin, min(begin + each, total)) for begin in range(0, total, max(each, 1))]


def softmax_in_place(
    logits_nV: Tensor,
    targets_n: Tensor,
    weights_n: Tensor,
    logprobs_n: Tensor,
    first_token: int,
    group: ProcessGroup | None,
    wants_grad: bool,
) -> None:
    """Fill `logprobs_n`, and replace the logits by the gradient of sum(weight * -logprob)."""
    statistics_3n = torch.empty(3, logits_nV.shape[0], dtype=torch.float32, device=logits_nV.device)
    arguments = (
        logits_nV,
        targets_n,
        weights_n,
        statistics_3n,
        logprobs_n,
        logits_nV.shape[0],
        logits_nV.shape[1],
        first_token,
    )
    if group is None:
        softmax_kernel[(logits_nV.shape[0],)](
            *arguments, READS=True, WRITES=wants_grad, WHOLE=True, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
        )
        return
    softmax_kernel[(logits_nV.shape[0],)](
        *arguments, READS=True, WRITES=False, WHOLE=False, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
    )
    biggest_n, target_n, total_n = statistics_3n
    own_n = biggest_n.clone()
    dist.all_reduce(statistics_3n[:2], dist.ReduceOp.MAX, group=group)  # over tp: target is -inf on all ranks but one
    total_n.mul_(torch.exp(own_n - biggest_n))
    dist.all_reduce(total_n, group=group)  # over tp
    logprobs_n.copy_((target_n - (biggest_n + total_n.log())).masked_fill_(target_n.isneginf(), math.nan))
    if wants_grad:
        softmax_kernel[(logits_nV.shape[0],)](
            *arguments, READS=False, WRITES=True, WHOLE=False, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
        )


def scaled_weight_gradient(grad_VD: Tensor, factor: Tensor, destination: GradDestination | None) -> Tensor:
    buffer = None if destination is None else destination()
    return scale_(grad_VD, factor) if buffer is None else torch.mul(grad_VD, factor, out=buffer)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x in place by a factor, a scalar on the device; where it is one, nothing is read or written."""
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, factor.float(), x.numel(), BLOCK=BLOCK, enable_fp_fusion=True, num_warps=8
        )
    return x


@triton.jit(do_not_specialize=["num_rows", "first_token"])
def softmax_kernel(
    logits, targets, weights, statistics, logprobs, num_rows, columns, first_token,
    READS: tl.constexpr, WRITES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: READS its maximum, sum and target logit (WHOLE: they are final), then WRITES the gradient from them."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    target = tl.load(targets + row) - first_token
    is_here = (target >= 0) & (target < columns)
    target = tl.where(is_here, target, -1).to(tl.int32)  # only now: a narrower number could fall onto a column
    if READS:
        biggest, total = row_statistics(start, columns, BLOCK)
        target_logit = tl.load(start + target, mask=is_here, other=float("-inf")).to(tl.float32)
        if WHOLE:
            logprob = target_logit - (biggest + tl.log(total))  # as log_softmax adds, to the bit
            tl.store(logprobs + row, tl.where(target_logit == float("-inf"), float("nan"), logprob))
        else:
            tl.store(statistics + row, biggest)
            tl.store(statistics + num_rows + row, target_logit)
            tl.store(statistics + 2 * num_rows + row, total)
    else:
        biggest = tl.load(statistics + row)
        total = tl.load(statistics + 2 * num_rows + row)
    if WRITES:
        weight = tl.load(weights + row)
        factor = weight / total
        tl.debug_barrier()  # the target's logit is read by all before one writes it
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < columns
            values = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(values - biggest) * factor - tl.where(column == target, weight, 0.0)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    scale = tl.load(factor)
    if scale != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        values = tl.load(x + place, mask=inside).to(tl.float32) * scale
        tl.store(x + place, values.to(x.dtype.element_ty), mask=inside)
