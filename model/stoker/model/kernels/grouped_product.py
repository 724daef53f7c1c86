"""Products of several experts with their own rows, one expert after another: the slow twin of the grouped kernels.

Reads the ends of the runs on the host, so it waits for a device. S rows, D input size, O output size, E experts.

Called by the reference and the deterministic kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(x, weight) -> x @ weight^T."""


def grouped_linear(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor, product: Product, backward: Product) -> Tensor:
    """Return y_SO. `weight_RD`: the experts' weights one below the other, R = E * O rows.

    `product` is used forward, `backward` for gradients.
    """
    y_SO: Tensor = GroupedLinear.apply(x_SD, weight_RD, ends_E, product, backward)
    return y_SO


class GroupedLinear(torch.autograd.Function):
    """Each expert's rows by its own weight. An expert without rows computes nothing, and its gradient is zero."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor, product: Product, backward: Product
    ) -> Tensor:
        ctx.runs, ctx.product = list(runs(ends_E)), backward
        ctx.save_for_backward(x_SD, weight_RD)
        weight_EOD = by_expert(weight_RD, len(ends_E))
        y_SO = x_SD.new_empty(x_SD.shape[0], weight_EOD.shape[1])
        for expert, rows in ctx.runs:
            y_SO[rows] = product(x_SD[rows], weight_EOD[expert])
        return y_SO

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_SD, weight_RD = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        experts = weight_RD.shape[0] // grad_SO.shape[1]
        grad_x = torch.empty_like(x_SD) if needs_x else None
        grad_weight = torch.zeros_like(weight_RD) if needs_weight else None
        for expert, rows in ctx.runs:
            if grad_x is not None:
                grad_x[rows] = ctx.product(grad_SO[rows], by_expert(weight_RD, experts)[expert].t())
            if grad_weight is not None:
                by_expert(grad_weight, experts)[expert] = ctx.product(grad_SO[rows].t(), x_SD[rows].t())
        return grad_x, grad_weight, None, None, None


def by_expert(weight_RD: Tensor, num_experts: int) -> Tensor:
    """Return the weights as [E, O, D]."""
    return weight_RD.view(num_experts, -1, weight_RD.shape[1])


def runs(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, and their rows."""
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
        if begin < end:
            yield expert, slice(begin, end)
