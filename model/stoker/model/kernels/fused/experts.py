"""The small operations around the products of experts: choose experts, gather their rows, add their results.

All of them work row by row in a fixed order, so a row's bits depend on the row alone. T tokens, E experts, K experts of
a token, S = T * K rows, D width of a row.

Called through `Ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.expert_rows import ExpertRows, Routes

BLOCK = 1024
"""Columns of one program."""


def route(logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes:
    """Choose by softmax and repeated maximum: of equal probabilities the lower expert comes first."""
    weights_TK, experts_TK = Route.apply(logits_TE, num_choices, normalise)
    return Routes(weights_TK, experts_TK)


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, num_choices: int, normalise: bool) -> tuple[Tensor, Tensor]:
        logits = logits_TE.contiguous()
        num_tokens, num_experts = logits.shape
        weights_TK = logits.new_empty(num_tokens, num_choices)
        experts_TK = torch.empty(num_tokens, num_choices, dtype=torch.int64, device=logits.device)
        if num_tokens:
            size = triton.next_power_of_2(num_experts)
            route_kernel[num_tokens,](logits, weights_TK, experts_TK, num_experts, num_choices, normalise, EXPERTS=size)
        ctx.save_for_backward(logits, weights_TK, experts_TK)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor, _experts: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, weights_TK, experts_TK = ctx.saved_tensors
        outer_TK = grad_TK * weights_TK
        total_T1 = outer_TK.sum(-1, keepdim=True)
        if ctx.normalise:  # softmax over the chosen experts alone: the normaliser over all of them cancels
            return torch.zeros_like(logits_TE).scatter_(1, experts_TK, outer_TK - weights_TK * total_T1), None, None
        return torch.softmax(logits_TE, -1).mul_(-total_T1).scatter_add_(1, experts_TK, outer_TK), None, None


def dispatch(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    x_SD: Tensor = Dispatch.apply(x_TD, rows)
    return x_SD


class Dispatch(torch.autograd.Function):
    """Forward: a copy of the token for each row. Backward: the sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: ExpertRows) -> Tensor:
        ctx.save_for_backward(rows.places)  # saved as such, so that recomputation drops it
        ctx.num_choices = rows.num_choices
        return x_TD.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        (places_S,) = ctx.saved_tensors
        return add_choices(grad_SD.contiguous(), None, places_S, ctx.num_choices), None


def combine(y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    y_TD: Tensor = Combine.apply(y_SD, weights_TK, rows)
    return y_TD


class Combine(torch.autograd.Function):
    """The weighted sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
        y_SD, weights_TK = y_SD.contiguous(), weights_TK.contiguous()
        ctx.save_for_backward(y_SD, weights_TK, rows.places)
        return add_choices(y_SD, weights_TK, rows.places, rows.num_choices)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        y_SD, weights_TK, places_S = ctx.saved_tensors
        grad, grad_y, grad_weights = grad_TD.contiguous(), torch.empty_like(y_SD), torch.empty_like(weights_TK)
        if y_SD.numel():
            num_choices, width = weights_TK.shape[1], y_SD.shape[1]
            combine_backward_kernel[len(places_S),](
                grad, y_SD, weights_TK, places_S, grad_y, grad_weights, num_choices, width, BLOCK=BLOCK
            )
        return grad_y, grad_weights, None


def add_choices(y_SD: Tensor, weights_TK: Tensor | None, places_S: Tensor, num_choices: int) -> Tensor:
    """Return the sum over each token's rows, weighted if there are weights: y_TD, added in float32."""
    num_tokens, width = y_SD.shape[0] // num_choices, y_SD.shape[1]
    y_TD = y_SD.new_empty(num_tokens, width)
    if y_TD.numel():
        add_kernel[num_tokens, triton.cdiv(width, BLOCK)](
            y_SD,
            y_SD if weights_TK is None else weights_TK,
            places_S,
            y_TD,
            width,
            CHOICES=num_choices,
            WEIGHTED=weights_TK is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    return y_TD


@triton.jit
def route_kernel(logits, weights, experts, num_experts, num_choices, normalise, EXPERTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, EXPERTS)
    inside = expert_E < num_experts
    logits_E = tl.load(logits + token * num_experts + expert_E, mask=inside, other=float("-inf"))
    exponentials_E = tl.exp(logits_E - tl.max(logits_E, 0))
    probabilities_E = tl.where(inside, exponentials_E / tl.sum(exponentials_E, 0), -1.0)
    total = 1.0
    if normalise:
        left_E = probabilities_E
        total = 0.0
        for _ in range(num_choices):
            chosen, best = take_best(left_E, expert_E, EXPERTS)
            left_E = tl.where(expert_E == chosen, -1.0, left_E)
            total += best
    left_E = probabilities_E
    for choice in range(num_choices):
        chosen, best = take_best(left_E, expert_E, EXPERTS)
        left_E = tl.where(expert_E == chosen, -1.0, left_E)
        tl.store(weights + token * num_choices + choice, best / total)
        tl.store(experts + token * num_choices + choice, chosen.to(tl.int64))


@triton.jit
def take_best(left_E, expert_E, EXPERTS: tl.constexpr):
    """The first expert with the highest probability that is left, and that probability."""
    best = tl.max(left_E, 0)
    return tl.min(tl.where(left_E == best, expert_E, EXPERTS), 0), best


@triton.jit
def add_kernel(y, weights, places, result, width, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(CHOICES):
        row = tl.load(places + token * CHOICES + choice)
        value = tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOICES + choice)
        total += value
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def combine_backward_kernel(
    grad, y, weights, places, grad_y, grad_weights, num_choices, width, BLOCK: tl.constexpr
):  # fmt: skip
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(places + choice)
    weight = tl.load(weights + choice)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        outer = tl.load(grad + choice // num_choices * width + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_y + row * width + column, (outer * weight).to(grad_y.dtype.element_ty), mask=inside)
        products += outer * value
    tl.store(grad_weights + choice, tl.sum(products, 0))
