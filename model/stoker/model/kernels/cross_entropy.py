"""Output layer and cross entropy in one autograd node: logits live for one chunk of tokens only, and their gradient is made while they are there.

T tokens, n tokens of a chunk, D hidden, V this rank's vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import cpu_product

CHUNK_BYTES = 64 * 2**20
"""Size of one chunk's float32 logits."""

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
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, num_targets, logprobs_T). `product(a_nd, b_ed)` is a @ b^T, `row_sum` sums the last dim and keeps it."""
    weights_T = weights_T.float()
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
    ) -> tuple[Tensor, Tensor]:
        rows = chunk_rows(weight_VD.shape[0])
        num_chunks = -(-hidden_TD.shape[0] // rows)
        logprobs_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        grad_hidden = torch.empty_like(hidden_TD) if wants_grad else None
        grad_weight = (
            torch.zeros_like(weight_VD, dtype=weight_VD.dtype if num_chunks <= 1 else torch.float32)
            if wants_grad
            else None
        )
        for begin in range(0, hidden_TD.shape[0], rows):
            chunk = slice(begin, begin + rows)
            local_n = targets_T[chunk] - first_token
            softmax = ChunkSoftmax(product(hidden_TD[chunk], weight_VD).float(), local_n, row_sum, group)
            logprobs_T[chunk] = softmax.logprobs_n
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = softmax.gradient(weights_T[chunk]).to(hidden_TD.dtype)
                grad_hidden[chunk] = cpu_product.product(grad_logits, weight_VD.t())
                grad_weight += cpu_product.product(grad_logits.t(), hidden_TD[chunk].t())
        if grad_hidden is not None and group is not None:
            dist.all_reduce(grad_hidden, group=group)  # over tp: each rank's vocabulary gave a part of the sum
        ctx.wants_grad = wants_grad
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(logprobs_T)
        return -(logprobs_T.double() * weights_T).sum().float(), logprobs_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scale = grad_loss.to(grad_hidden.dtype)
        return (
            grad_hidden * scale if needs_hidden else None,
            grad_weight * scale if needs_weight else None,
            *(None,) * 7,
        )


class ChunkSoftmax:
    """The probabilities of one chunk. Consumes `logits_nV`: the buffer becomes exp, then the gradient."""

    def __init__(self, logits_nV: Tensor, targets_n: Tensor, row_sum: RowSum, group: ProcessGroup | None) -> None:
        self.here_n1 = ((targets_n >= 0) & (targets_n < logits_nV.shape[-1])).unsqueeze(1)
        self.targets_n1 = targets_n.clamp(0, logits_nV.shape[-1] - 1).unsqueeze(1)
        biggest = logits_nV.amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(biggest, dist.ReduceOp.MAX, group=group)
        shifted = logits_nV.sub_(biggest)
        target_logit = shifted.gather(1, self.targets_n1) * self.here_n1
        self.exponentials = shifted.exp_()
        self.sums_n1 = row_sum(self.exponentials)
        if group is not None:
            dist.all_reduce(self.sums_n1, group=group)
            dist.all_reduce(target_logit, group=group)
        self.logprobs_n = (target_logit - self.sums_n1.log()).squeeze(1)

    def gradient(self, weights_n: Tensor) -> Tensor:
        """Gradient of sum(weight * -logprob) with respect to the logits."""
        weights_n1 = weights_n.unsqueeze(1)
        grad = self.exponentials.mul_(weights_n1 / self.sums_n1)
        return grad.scatter_add_(1, self.targets_n1, -(weights_n1 * self.here_n1))


def chunk_rows(vocab_rows: int) -> int:
    """Tokens per chunk: a multiple of 16."""
    return max(16, CHUNK_BYTES // (4 * vocab_rows) // 16 * 16)
