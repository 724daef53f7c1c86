"""Output layer and cross entropy in chunks of tokens, in plain torch with the caller's product and sum.

Logits live for one chunk only, and their gradient is computed while they do.

T tokens, n tokens of a chunk, D hidden, V this rank's vocabulary rows.

Called by the `reference` and the `deterministic` kernels; `fused/cross_entropy.py` does the same on a GPU. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import cpu_product


@dataclass(frozen=True)
class ChunkBytes:
    """Sizes of the logits that exist at once."""

    logits: int = 128 * 2**20
    """Chunk in the compute dtype: large, because each chunk reads the whole table and writes a gradient as large."""
    softmax: int = 24 * 2**20
    """Chunk in float32: the allocator reuses buffers below 32 MiB."""


class ChunkTokens(NamedTuple):
    """Tokens of a chunk."""

    logits: int
    softmax: int


def chunks_of(dtype: torch.dtype, rows: int, chunk_bytes: ChunkBytes) -> ChunkTokens:
    """Return the tokens whose logits over so many rows of the table take these bytes."""
    return ChunkTokens(chunk_bytes.logits // (dtype.itemsize * rows), chunk_bytes.softmax // (4 * rows))


Product = Callable[[Tensor, Tensor], Tensor]
RowSum = Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    product: Product,
    row_sum: RowSum,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    first_token: int,
    group: ProcessGroup | None,
    chunk_bytes: ChunkBytes = ChunkBytes(),
    most_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, num_targets, logprobs_T). `product(a_nd, b_ed)` is a @ b^T, `row_sum` sums the last dim and keeps it.

    `most_rows`: V of the rank that has most (default: of this one), by which all ranks cut the same chunks.

    A target with a weight that is no token of the whole table makes its logprob, and so the loss, NaN: saying it in an
    error would have to wait for the device.
    """
    weights_T = weights_T.to(hidden_TD.device, torch.float32)
    wants_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    counted = weights_T.nonzero().squeeze(1)  # most tokens of a chat have no loss: skip their logits
    loss_sum, logprobs = ChunkedCrossEntropy.apply(
        hidden_TD.index_select(0, counted),
        weight_VD,
        targets_T.index_select(0, counted).long(),
        weights_T.index_select(0, counted),
        product,
        row_sum,
        first_token,
        group,
        wants_grad,
        chunks_of(hidden_TD.dtype, most_rows or weight_VD.shape[0], chunk_bytes),
    )
    return loss_sum, weights_T.sum(), torch.zeros_like(weights_T).index_copy(0, counted, logprobs)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Forward makes the gradients of loss_sum; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        product: Product,
        row_sum: RowSum,
        first_token: int,
        group: ProcessGroup | None,
        wants_grad: bool,
        chunk_tokens: ChunkTokens,
    ) -> tuple[Tensor, Tensor]:
        logprobs_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        grad_hidden = torch.empty_like(hidden_TD) if wants_grad else None
        grad_weight: Tensor | None = None
        for chunk in slices(hidden_TD.shape[0], chunk_tokens.logits):
            logits = product(hidden_TD[chunk], weight_VD)
            softmax_in_place(
                logits,
                targets_T[chunk] - first_token,
                weights_T[chunk],
                logprobs_T[chunk],
                row_sum,
                group,
                wants_grad,
                chunk_tokens.softmax,
            )
            if grad_hidden is not None:  # the logits are their gradient now
                grad_hidden[chunk] = cpu_product.product(logits, weight_VD.t())
                if ctx.needs_input_grad[1]:
                    grad_chunk = cpu_product.product(logits.t(), hidden_TD[chunk].t())
                    grad_weight = grad_chunk if grad_weight is None else grad_weight.float().add_(grad_chunk)
        if grad_hidden is not None and group is not None:
            dist.all_reduce(grad_hidden, group=group)  # over tp: each rank's vocabulary gave a part of the sum
        if grad_hidden is not None:
            if grad_weight is None and ctx.needs_input_grad[1]:  # no token counts
                grad_weight = torch.zeros_like(weight_VD)
            ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(logprobs_T)
        return -(logprobs_T.double() * weights_T).sum().float(), logprobs_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return (
            grad_hidden * grad_loss if needs_hidden else None,
            grad_weight * grad_loss if needs_weight and grad_weight is not None else None,
            *(None,) * 8,
        )


def softmax_in_place(
    logits_nV: Tensor,
    targets_n: Tensor,
    weights_n: Tensor,
    logprobs_n: Tensor,
    row_sum: RowSum,
    group: ProcessGroup | None,
    wants_grad: bool,
    softmax_tokens: int,
) -> None:
    """Fill `logprobs_n`, and replace the logits by the gradient of sum(weight * -logprob): few rows at a time, in
    float32.
    """
    for few in slices(logits_nV.shape[0], softmax_tokens):
        softmax = ChunkSoftmax(logits_nV[few].float(), targets_n[few], row_sum, group)
        logprobs_n[few] = softmax.logprobs_n
        if wants_grad:
            logits_nV[few] = softmax.gradient(weights_n[few])


class ChunkSoftmax:
    """The probabilities of one chunk. Consumes `logits_nV`: the buffer becomes exp, then the gradient."""

    def __init__(self, logits_nV: Tensor, targets_n: Tensor, row_sum: RowSum, group: ProcessGroup | None) -> None:
        self.here_n1 = ((targets_n >= 0) & (targets_n < logits_nV.shape[-1])).unsqueeze(1)
        self.targets_n1 = targets_n.clamp(0, logits_nV.shape[-1] - 1).unsqueeze(1)
        biggest = logits_nV.amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(biggest, dist.ReduceOp.MAX, group=group)
        shifted = logits_nV.sub_(biggest)
        target_logit = torch.where(self.here_n1, shifted.gather(1, self.targets_n1), -math.inf)
        self.exponentials = shifted.exp_()
        self.sums_n1 = row_sum(self.exponentials)
        if group is not None:
            dist.all_reduce(self.sums_n1, group=group)
            dist.all_reduce(target_logit, dist.ReduceOp.MAX, group=group)  # over tp: -inf on all ranks but one
        nobodys_n1 = target_logit.isneginf()
        self.logprobs_n = (target_logit - self.sums_n1.log()).masked_fill_(nobodys_n1, math.nan).squeeze(1)

    def gradient(self, weights_n: Tensor) -> Tensor:
        """Gradient of sum(weight * -logprob) with respect to the logits."""
        weights_n1 = weights_n.unsqueeze(1)
        grad = self.exponentials.mul_(weights_n1 / self.sums_n1)
        return grad.scatter_add_(1, self.targets_n1, -(weights_n1 * self.here_n1))


def slices(total: int, rows: int) -> list[slice]:
    """Return runs of `rows`, rounded down to a multiple of 16 and at least 16."""
    rows = max(16, rows // 16 * 16)
    return [slice(begin, min(begin + rows, total)) for begin in range(0, total, rows)]
