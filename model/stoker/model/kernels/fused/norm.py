"""RMS norm of rows, alone or of a sum.

One program per row forward; backward keeps the weight's gradient in registers over a run of rows.

T rows, D columns. Statistics and products in float32; a sum is rounded to its dtype before it is normalised, as it is
stored. After a product in eight bits both passes note the largest magnitude of what they make, for the next cast.

Called through `Ops`, and by `norm_linear`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fp8 import is_product, note_amax
from stoker.model.kernels.fused.launch import overlap, wait_for_last

BACKWARD_ELEMENTS = 264 * 4096
"""Columns of all programs of the backward pass together.

Each gives one row of partial sums of the weight's gradient; a constant, so that the order of addition depends on the
shape alone.
"""


BACKWARD_STAGES = 2
"""Rows that the backward pass has on their way."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if wants_grad(x_TD, weight_D):
        result: Tensor = RmsNorm.apply(x_TD, weight_D, eps)
        return result
    return forward(x_TD, None, weight_D, eps, saves=False)[0]


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if wants_grad(x_TD, residual_TD, weight_D):
        normed, total = AddRmsNorm.apply(x_TD, residual_TD, weight_D, eps)
        return normed, total
    normed_TD, total_TD, _ = forward(x_TD, residual_TD, weight_D, eps, saves=False)
    return normed_TD, total_TD


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed, x_TD, scales_T = forward(x_TD, None, weight_D, eps, saves=True)
        ctx.save_for_backward(x_TD, weight_D, scales_T)
        return normed

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = backward(grad_TD, None, ctx.saved_tensors)
        return grad_x, grad_weight, None


class AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total, scales_T = forward(x_TD, residual_TD, weight_D, eps, saves=True, notes=is_product(x_TD))
        ctx.save_for_backward(total, weight_D, scales_T)
        ctx.notes = is_product(x_TD)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor | None, grad_total_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_TD is None:  # the norm was not used
            return grad_total_TD, grad_total_TD, None, None
        grad_x, grad_weight = backward(grad_TD, grad_total_TD, ctx.saved_tensors, notes=ctx.notes)
        return grad_x, grad_x, grad_weight, None


def forward(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, saves: bool, notes: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """normed_TD, the normalised values before their scaling, and each row's scale (empty unless `saves`)."""
    columns = weight_D.shape[0]
    x = x_TD.reshape(-1, columns)
    residual = None if residual_TD is None else residual_TD.reshape(-1, columns).contiguous()
    x = x if residual is None and x.stride(1) == 1 else x.contiguous()
    normed = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    total = x_TD if residual is None else torch.empty_like(normed)
    scales = torch.empty(x.shape[0] if saves else 0, dtype=torch.float32, device=x.device)
    amax = torch.empty(x.shape[0], dtype=torch.float32, device=x.device) if notes else None
    if x.numel():
        block = triton.next_power_of_2(columns)
        forward_kernel[(x.shape[0],)](
            x,
            residual,
            weight_D,
            normed,
            total,
            scales,
            amax,
            x.stride(0),
            columns,
            eps,
            HAS_RESIDUAL=residual is not None,
            SAVES=saves,
            NOTES=notes,
            BLOCK=block,
            enable_fp_fusion=True,
            num_warps=num_warps(block),
            **overlap(),
        )
    if amax is not None:
        note_amax(normed, amax)
    return normed, total, scales


def backward(
    grad_TD: Tensor, grad_total_TD: Tensor | None, saved: tuple[Tensor, Tensor, Tensor], notes: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum and of the weight. `saved`: the sum, the weight and each row's scale."""
    total_TD, weight_D, scales_T = saved
    columns = weight_D.shape[0]
    total = total_TD.reshape(-1, columns).contiguous()
    grad, grad_x = grad_TD.reshape(-1, columns).contiguous(), torch.empty_like(total)
    if not total.numel():
        return grad_x.view(total_TD.shape), torch.zeros_like(weight_D)
    block = triton.next_power_of_2(columns)
    rows_each = triton.cdiv(total.shape[0], max(132, BACKWARD_ELEMENTS // block))
    programs = triton.cdiv(total.shape[0], rows_each)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
    amax = torch.empty(programs, dtype=torch.float32, device=total.device) if notes else None
    backward_kernel[(programs,)](
        grad,
        None if grad_total_TD is None else grad_total_TD.contiguous(),
        total,
        weight_D,
        scales_T,
        grad_x,
        partial,
        amax,
        total.shape[0],
        rows_each,
        columns,
        HAS_GRAD_TOTAL=grad_total_TD is not None,
        NOTES=notes,
        BLOCK=block,
        STAGES=BACKWARD_STAGES,
        enable_fp_fusion=True,
        num_warps=num_warps(block),
    )
    grad_x = grad_x.view(total_TD.shape)
    if amax is not None:
        note_amax(grad_x, amax)
    return grad_x, partial.sum(0).to(weight_D.dtype)


def num_warps(block: int) -> int:
    """Return the number of warps: 16 elements or more per thread, so that each loads whole lines."""
    return min(16, max(1, block // 512))


@triton.jit
def forward_kernel(
    x, residual, weight, normed, total, scales, amax, stride, columns, eps,
    HAS_RESIDUAL: tl.constexpr, SAVES: tl.constexpr, NOTES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / columns + eps)
    if SAVES:
        tl.store(scales + row, scale)
    result = values * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = result.to(normed.dtype.element_ty)
    tl.store(normed + row * columns + column, result, mask=inside)
    if NOTES:
        tl.store(amax + row, tl.max(tl.where(inside, tl.abs(result.to(tl.float32)), 0.0), 0))


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def backward_kernel(
    grad, grad_total, total, weight, scales, grad_x, partial, amax, num_rows, rows_each, columns,
    HAS_GRAD_TOTAL: tl.constexpr, NOTES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    scaling = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    first = program.to(tl.int64) * rows_each
    for index in tl.range(0, tl.minimum(rows_each, num_rows - first), num_stages=STAGES):
        row = first + index
        place = row * columns + column
        scale = tl.load(scales + row)
        normed = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * scale
        outer = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        grad_weight += outer * normed
        inner = outer * scaling
        result = scale * (inner - normed * (tl.sum(inner * normed, 0) / columns))
        if HAS_GRAD_TOTAL:
            result += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, rounded, mask=inside)
        if NOTES:
            largest = tl.maximum(largest, tl.where(inside, tl.abs(rounded.to(tl.float32)), 0.0))
    tl.store(partial + program.to(tl.int64) * columns + column, grad_weight, mask=inside)
    if NOTES:
        tl.store(amax + program, tl.max(largest, 0))
