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

Product = Callable[[Tensor, Tensor], Tensor]
Place = Callable[[], Tensor | None]

MAX_ROWS = 4
"""Above, products of tensor cores win."""
MAX_WEIGHT_BYTES = 7 * 2**20
"""Above, cuBLAS is as fast: measured on an H200, 4.0 against 5.9 us for 1024 x 2048 in bfloat16, 5.2 against 7.5 for 1024 x 3072, a tie at 4096 x 1024."""
PROGRAMS = 1056
"""How many programs to aim at: eight for each of 132 multiprocessors."""


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad):
        y_TE: Tensor = Linear.apply(x_TD, weight_ED, plain_product)
        return y_TE if bias_E is None else y_TE + bias_E
    if x_TD.shape[0] <= MAX_ROWS and suits_rows(x_TD, weight_ED):
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
        weight_ED.nbytes <= MAX_WEIGHT_BYTES
        and weight_ED.numel() > 0
        and x_TD.shape[0] > 0
        and x_TD.dim() == 2
        and x_TD.dtype is weight_ED.dtype
        and weight_ED.is_contiguous()
        and weight_ED.shape[1] % 256 == 0
    )


def few_rows(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x @ weight^T for 1 to MAX_ROWS rows; each output element is the work of one program."""
    num_rows, num_outputs, depth = x_TD.shape[0], weight_ED.shape[0], weight_ED.shape[1]
    y_TE = torch.empty(num_rows, num_outputs, dtype=x_TD.dtype, device=x_TD.device)
    rows = triton.next_power_of_2(num_rows)
    outputs, columns = weight_tile(num_outputs, depth, rows)
    few_rows_kernel[(triton.cdiv(num_outputs, outputs),)](
        x_TD.contiguous(),
        weight_ED,
        y_TE,
        num_rows,
        num_outputs,
        depth,
        ROWS=rows,
        OUTPUTS=outputs,
        COLUMNS=columns,
        enable_fp_fusion=True,
        num_warps=4,
    )
    return y_TE


def weight_tile(num_outputs: int, depth: int, rows: int) -> tuple[int, int]:
    """Outputs of one program, and how many of their columns it reads at once: 8,192 products in registers, or fewer where the weight has no more."""
    outputs = min(8, max(1, triton.next_power_of_2(num_outputs // PROGRAMS + 1) // 2))
    columns = min(8192 // (outputs * rows), 4096)
    while depth % columns:
        columns //= 2
    return outputs, columns


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x, weight, y, num_rows, num_outputs, depth, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    weights = weight + output.to(tl.int64)[:, None] * depth + column[None, :]
    inputs = x + row[:, None] * depth + column[None, :]
    has_output, has_row = (output < num_outputs)[:, None], (row < num_rows)[:, None]
    products = tl.zeros([ROWS, OUTPUTS, COLUMNS], dtype=tl.float32)
    for begin in range(0, depth, COLUMNS):
        weights_EC = tl.load(weights + begin, mask=has_output, other=0.0).to(tl.float32)
        inputs_TC = tl.load(inputs + begin, mask=has_row, other=0.0).to(tl.float32)
        products += weights_EC[None, :, :] * inputs_TC[:, None, :]
    place = row[:, None] * num_outputs + output[None, :]
    inside = has_row & (output < num_outputs)[None, :]
    tl.store(y + place, tl.sum(products, 2).to(y.dtype.element_ty), mask=inside)
