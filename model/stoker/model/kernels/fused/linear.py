"""Products with weights: cuBLAS, but for few rows and for several ones kernels of our own.

T rows, D input size, E output size.

Called through `Ops`, and by `cross_entropy` and `logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.model.kernels.fused.few_rows import few_rows, suits_rows
from stoker.model.kernels.fused.several_rows import several_rows, tile_for
from stoker.model.kernels.grad_destination import grad_destination, weight_gradient
from stoker.model.kernels.weight_queue import later, now_or_later

Product = Callable[[Tensor, Tensor], Tensor]


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad):
        y_TE: Tensor = Linear.apply(x_TD, weight_ED, plain_product)
        return y_TE if bias_E is None else y_TE + bias_E
    if suits_rows(x_TD, weight_ED):
        y_TE = few_rows(x_TD, weight_ED)
        return y_TE if bias_E is None else y_TE + bias_E
    if (tile := tile_for(x_TD, weight_ED)) is not None:
        y_TE = several_rows(x_TD, weight_ED, tile)
        return y_TE if bias_E is None else y_TE + bias_E
    return F.linear(x_TD, weight_ED, bias_E)


def plain_product(a_nd: Tensor, b_ed: Tensor) -> Tensor:
    """Return a @ b^T."""
    return F.linear(a_nd, b_ed)


class Linear(torch.autograd.Function):
    """x @ W^T by the given product; backward by plain ones. The weight's gradient goes to its destination."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.destination = grad_destination(weight_ED)
        ctx.later = later(weight_ED)
        return product(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        destination = ctx.destination
        grad_weight = (
            now_or_later(ctx.later, lambda: weight_gradient(grad_TE, x_TD, destination)) if needs_weight else None
        )
        return grad_TE @ weight_ED if needs_x else None, grad_weight, None


def pack(weight_ED: Tensor) -> Tensor:
    """Return the weight itself: weights are read as they lie."""
    return weight_ED
