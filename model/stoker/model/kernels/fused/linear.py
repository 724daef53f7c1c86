"""Products with weights: cuBLAS, but for few rows and small weights a kernel of our own.

T rows, D input size, E output size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stoker.model.kernels.fused.launch import overlap

Product = Callable[[Tensor, Tensor], Tensor]
Place = Callable[[], Tensor | None]

MAX_WEIGHT_BYTES = {1: 256 * 2**20, 2: 7 * 2**20}
"""By the number of rows, the largest weights for which this kernel beat cuBLAS on an H200; cuBLAS reads larger ones at the memory's speed too.

One row in bfloat16, us, here and by cuBLAS: 6144 x 4096 14.9 and 16.6, 4096 x 4096 10.2 and 13.4, 28672 x 4096 55.8 and 56.2, 4096 x 14336 29.2 and 31.5.
"""
OUTPUTS = 4
"""Outputs of one program."""
PRODUCTS = 4096
"""Weights times rows that a program takes at once; the next as many are on their way."""


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad):
        y_TE: Tensor = Linear.apply(x_TD, weight_ED, plain_product)
        return y_TE if bias_E is None else y_TE + bias_E
    if suits_rows(x_TD, weight_ED):
        y_TE = few_rows(x_TD, weight_ED)
        return y_TE if bias_E is None else y_TE + bias_E
    return F.linear(x_TD, weight_ED, bias_E)


def plain_product(a_nd: Tensor, b_ed: Tensor) -> Tensor:
    """a @ b^T"""
    return F.linear(a_nd, b_ed)


class Linear(torch.autograd.Function):
    """x @ W^T by the given product; backward by plain ones. The weight's gradient is written where its owner wants it."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.place = gradient_place(weight_ED)
        return product(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_weight = weight_gradient(grad_TE, x_TD, ctx.place) if needs_weight else None
        return grad_TE @ weight_ED if needs_x else None, grad_weight, None


def gradient_place(weight: Tensor) -> Place | None:
    """What a parameter's owner set to say where its next gradient goes: a call that gives a buffer of the weight's shape and dtype, or None."""
    place: Place | None = getattr(weight, "gradient_place", None)
    return place


def weight_gradient(grad_TE: Tensor, x_TD: Tensor, place: Place | None) -> Tensor:
    """grad^T @ x, in the buffer that `place` gives. That very tensor is returned, so that autograd keeps it without a copy."""
    buffer = None if place is None else place()
    return grad_TE.t() @ x_TD if buffer is None else torch.mm(grad_TE.t(), x_TD, out=buffer)


def pack(weight_ED: Tensor) -> Tensor:
    """Weights are read as they lie."""
    return weight_ED


def suits_rows(x_TD: Tensor, weight_ED: Tensor) -> bool:
    return (
        weight_ED.nbytes <= MAX_WEIGHT_BYTES.get(x_TD.shape[0], 0)
        and weight_ED.numel() > 0
        and x_TD.dim() == 2
        and x_TD.dtype is weight_ED.dtype
        and weight_ED.is_contiguous()
        and weight_ED.shape[1] % (PRODUCTS // OUTPUTS) == 0
    )


def few_rows(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x @ weight^T for up to four rows and a depth of whole thousands: one tile serves every shape, so it is compiled once per number of rows."""
    num_rows, num_outputs, depth = x_TD.shape[0], weight_ED.shape[0], weight_ED.shape[1]
    y_TE = torch.empty(num_rows, num_outputs, dtype=x_TD.dtype, device=x_TD.device)
    rows = triton.next_power_of_2(num_rows)
    few_rows_kernel[(triton.cdiv(num_outputs, OUTPUTS),)](
        x_TD.contiguous(),
        weight_ED,
        y_TE,
        num_rows,
        num_outputs,
        depth,
        ROWS=rows,
        OUTPUTS=OUTPUTS,
        COLUMNS=columns_at_once(rows),
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )
    return y_TE


def columns_at_once(rows: int) -> int:
    return PRODUCTS // OUTPUTS // max(1, rows // 2)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x, weight, y, num_rows, num_outputs, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Weights are read before the last kernel is waited for: none writes them, and between a change of weights and this lies the embedding, an ordinary launch."""
    if OVERLAPS:
        gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    weights = weight + output.to(tl.int64)[:, None] * depth + column[None, :]
    inputs = x + row[:, None] * depth + column[None, :]
    has_output, has_row = (output < num_outputs)[:, None], (row < num_rows)[:, None]
    products = tl.zeros([ROWS, OUTPUTS, COLUMNS], dtype=tl.float32)
    weights_EC = tl.load(weights, mask=has_output, other=0.0)
    if OVERLAPS:
        gdc_wait()
    for begin in range(0, depth, COLUMNS):
        ahead = begin + COLUMNS
        next_EC = tl.load(weights + ahead, mask=has_output & (ahead + column < depth)[None, :], other=0.0)
        inputs_TC = tl.load(inputs + begin, mask=has_row, other=0.0).to(tl.float32)
        products += weights_EC.to(tl.float32)[None, :, :] * inputs_TC[:, None, :]
        weights_EC = next_EC
    place = row[:, None] * num_outputs + output[None, :]
    inside = has_row & (output < num_outputs)[None, :]
    tl.store(y + place, tl.sum(products, 2).to(y.dtype.element_ty), mask=inside)
