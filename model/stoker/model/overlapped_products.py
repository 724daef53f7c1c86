"""Products beside the exchange of their tokens, for sequence parallelism: what is sent is hidden behind what is here.

Each function equals the two that it names, of `tensor_group` and `Ops.linear`; only the order of work differs.
T tokens, t tokens of one rank, D input size, E output size. Called by the layers of `parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.grad_destination import grad_destination, weight_gradient
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.weight_queue import later, now_or_later
from stoker.model.tensor_group import shard_size

SPLITS = 2
"""Parts of a product whose sums over the ranks are on their way while the next part is computed."""


def gather_linear(x_tD: Tensor, weight_ED: Tensor, group: ProcessGroup, ops: Ops) -> Tensor:
    """Return y_TE = linear(gather_tokens(x)): the rank's own tokens are multiplied while the others arrive.

    Backward sends the input's gradient while it computes the weight's. The gathered tokens are kept for it, unless
    `ops` notes how to get them back.
    """
    x_TD = x_tD.new_empty(x_tD.shape[0] * dist.get_world_size(group), x_tD.shape[1])
    ops.note_gathered(x_TD, x_tD, group)
    y_TE: Tensor = GatherLinear.apply(x_tD, weight_ED, x_TD, group)
    return y_TE


def linear_scatter(x_TD: Tensor, weight_ED: Tensor, group: ProcessGroup) -> Tensor:
    """Return y_tE = scatter_tokens(linear(x)): one part of the product is summed while the next one is computed.

    Backward multiplies the rank's own tokens while the others arrive.

    Raises:
        ValueError: the tokens cannot be cut evenly.
    """
    y_tE: Tensor = LinearScatter.apply(x_TD, weight_ED, group)
    return y_tE


class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, weight_ED: Tensor, x_TD: Tensor, group: ProcessGroup) -> Tensor:
        y_TE = gathered_product(x_tD, weight_ED.t(), x_TD, group)
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.group, ctx.destination, ctx.later = group, grad_destination(weight_ED), later(weight_ED)
        return y_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_TD = grad_TE @ weight_ED
        own_tD = grad_TD.new_empty(grad_TD.shape[0] // dist.get_world_size(ctx.group), grad_TD.shape[1])
        sent = started(dist.reduce_scatter_tensor(own_tD, grad_TD, group=ctx.group, async_op=True))
        grad_weight = gradient_of_weight(ctx, grad_TE, x_TD)
        sent.wait()
        return own_tD, grad_weight, None, None


class LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.group, ctx.destination, ctx.later = group, grad_destination(weight_ED), later(weight_ED)
        return scattered_product(x_TD, weight_ED.t(), group)

    @staticmethod
    def backward(ctx: Any, grad_tE: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_tE = grad_tE.contiguous()
        grad_TE = grad_tE.new_empty(x_TD.shape[0], grad_tE.shape[1])
        grad_TD = gathered_product(grad_tE, weight_ED, grad_TE, ctx.group)
        return grad_TD, gradient_of_weight(ctx, grad_TE, x_TD), None


def gradient_of_weight(ctx: Any, grad_TE: Tensor, x_TD: Tensor) -> Tensor | None:
    """Return grad^T @ x at its destination, or None where it is not needed or put off."""
    if not ctx.needs_input_grad[1]:
        return None
    return now_or_later(ctx.later, lambda: weight_gradient(grad_TE, x_TD, ctx.destination))


def gathered_product(x_tD: Tensor, columns_DE: Tensor, x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Write the ranks' tokens one after another into x_TD; return x_TD @ columns."""
    tokens, rank = x_tD.shape[0], dist.get_rank(group)
    y_TE = x_tD.new_empty(x_TD.shape[0], columns_DE.shape[1])
    arriving = started(dist.all_gather_into_tensor(x_TD, x_tD.contiguous(), group=group, async_op=True))
    own = slice(rank * tokens, (rank + 1) * tokens)
    torch.mm(x_tD, columns_DE, out=y_TE[own])
    arriving.wait()
    for others in (slice(0, own.start), slice(own.stop, x_TD.shape[0])):
        if others.start < others.stop:
            torch.mm(x_TD[others], columns_DE, out=y_TE[others])
    return y_TE


def scattered_product(x_TD: Tensor, columns_DE: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x_TD @ columns over the ranks, for this rank's tokens."""
    tokens = shard_size(x_TD.shape[0], group, "tokens")
    y_tE = x_TD.new_empty(tokens, columns_DE.shape[1])
    sending = []
    for part in parts_of(tokens):
        partial = x_TD.new_empty(dist.get_world_size(group), part.stop - part.start, y_tE.shape[1])
        for rank, product in enumerate(partial):
            first = rank * tokens
            torch.mm(x_TD[first + part.start : first + part.stop], columns_DE, out=product)
        work = dist.reduce_scatter_tensor(y_tE[part], partial.flatten(0, 1), group=group, async_op=True)
        sending.append((started(work), partial))  # the memory lives until it is sent
    for work, _ in sending:
        work.wait()
    return y_tE


def started(work: dist.Work | None) -> dist.Work:
    """Return a collective that runs in the background; none runs outside of the group."""
    assert work is not None, "this rank is not in the group"
    return work


def parts_of(tokens: int) -> Iterator[slice]:
    """Yield the parts, the first of them the larger ones."""
    size = -(-tokens // SPLITS)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
