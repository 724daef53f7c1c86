"""Products of several experts with their own rows in one launch: one for the outputs, two for the gradients.

Nothing waits for the device: a program finds its expert in the ends of the runs. Every output element is one chain over
the columns in order, so a row's bits do not depend on its batch or place, and the deterministic mode uses the same
kernels. In training, two-byte products of many rows on Hopper and later are torch's grouped product.

S rows, D input size, O output size, E experts, R = E * O.

Called through `Ops`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.grad_destination import GradDestination, grad_destination

ALIGNMENT = 16
"""Bytes: torch's grouped product needs rows that begin at such places."""
FEW_ROWS = 32
"""Rows of a mean expert up to which small tiles are used."""


class Tile(NamedTuple):
    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int


FEW = Tile(16, 64, 128, 4, 4)
MANY = Tile(128, 128, 64, 8, 3)
PLAIN = Tile(32, 64, 32, 4, 3)
"""float32, whose products are not for tensor cores."""
WEIGHT_GRADIENT = Tile(64, 128, 128, 8, 3)
"""Rows of one step, outputs and columns of the weight."""
PLAIN_WEIGHT_GRADIENT = Tile(32, 64, 64, 4, 2)


def grouped_linear(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Return y_SO, differentiable; two-byte products of training by torch where it has a kernel for them."""
    if not torch.is_grad_enabled() or not (x_SD.requires_grad or weight_RD.requires_grad):
        return product(x_SD, by_expert(weight_RD, ends_E), ends_E)
    by_torch = suits_torch(x_SD, weight_RD, ends_E)
    y_SO: Tensor = GroupedLinear.apply(x_SD, weight_RD, ends_E, by_torch)
    return y_SO


def grouped_linear_deterministic(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Return y_SO, differentiable; with and without gradient by the same kernel."""
    if not torch.is_grad_enabled() or not (x_SD.requires_grad or weight_RD.requires_grad):
        return product(x_SD, by_expert(weight_RD, ends_E), ends_E)
    y_SO: Tensor = GroupedLinear.apply(x_SD, weight_RD, ends_E, False)
    return y_SO


def by_expert(weight_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Return the weights as [E, O, D]."""
    return weight_RD.view(len(ends_E), -1, weight_RD.shape[1])


def suits_torch(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> bool:
    """Whether torch's grouped product has a kernel for these products that does not wait for the device."""
    if not x_SD.is_cuda or x_SD.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(x_SD.device) < (9, 0):
        return False
    sizes = (weight_RD.shape[0] // len(ends_E), weight_RD.shape[1])
    is_aligned = all(size * x_SD.element_size() % ALIGNMENT == 0 for size in sizes)
    return is_aligned and weight_RD.data_ptr() % ALIGNMENT == 0 and x_SD.shape[0] > FEW_ROWS * len(ends_E)


class GroupedLinear(torch.autograd.Function):
    """The product and its two gradients. The weight's gradient goes to its destination where our kernel makes it."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor, by_torch: bool) -> Tensor:
        ctx.by_torch, ctx.destination = by_torch, grad_destination(weight_RD)
        ctx.save_for_backward(x_SD, weight_RD, ends_E)
        weight_EOD = by_expert(weight_RD, ends_E)
        if by_torch:
            return F.grouped_mm(x_SD.contiguous(), weight_EOD.transpose(1, 2), offs=ends_E)
        return product(x_SD, weight_EOD, ends_E)

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_SD, weight_RD, ends_E = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_SO, weight_EOD = grad_SO.contiguous(), by_expert(weight_RD, ends_E)
        if ctx.by_torch:
            grad_x = F.grouped_mm(grad_SO, weight_EOD, offs=ends_E) if needs_x else None
            grad_weight = F.grouped_mm(grad_SO.t(), x_SD.contiguous(), offs=ends_E) if needs_weight else None
            return grad_x, None if grad_weight is None else grad_weight.reshape_as(weight_RD), None, None
        grad_x = product(grad_SO, weight_EOD.transpose(1, 2), ends_E) if needs_x else None
        into = empty_gradient(weight_RD, ctx.destination) if needs_weight else None
        if into is not None:
            weight_gradient(grad_SO, x_SD.contiguous(), ends_E, into)
        return grad_x, into, None, None


def empty_gradient(weight_RD: Tensor, destination: GradDestination | None) -> Tensor:
    buffer = None if destination is None else destination()
    return torch.empty_like(weight_RD) if buffer is None else buffer


def product(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Return each expert's rows times its weight, transposed. The weight may be a transposed view."""
    x = x_SD.contiguous()
    num_rows, depth, (num_experts, num_outputs, _) = x.shape[0], x.shape[1], weight_EOD.shape
    y_SO = x.new_empty(num_rows, num_outputs)
    if not y_SO.numel():
        return y_SO
    tile = PLAIN if x.dtype is torch.float32 else FEW if num_rows <= FEW_ROWS * num_experts else MANY
    # Each expert's last tile may be a partial one. Programs beyond the last tile end at once.
    grid = (triton.cdiv(num_rows, tile.rows) + num_experts, triton.cdiv(num_outputs, tile.outputs))
    product_kernel[grid](
        x,
        weight_EOD,
        y_SO,
        ends_E,
        num_experts,
        num_outputs,
        depth,
        *weight_EOD.stride(),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        EXPERTS=triton.next_power_of_2(num_experts),
        enable_fp_fusion=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y_SO


def weight_gradient(grad_SO: Tensor, x_SD: Tensor, ends_E: Tensor, into_RD: Tensor) -> None:
    """Write each expert's grad^T @ x over its rows; zeros for an expert without rows."""
    num_outputs, depth = grad_SO.shape[1], x_SD.shape[1]
    tile = PLAIN_WEIGHT_GRADIENT if x_SD.dtype is torch.float32 else WEIGHT_GRADIENT
    grid = (len(ends_E), triton.cdiv(num_outputs, tile.outputs), triton.cdiv(depth, tile.columns))
    weight_gradient_kernel[grid](
        grad_SO,
        x_SD,
        into_RD,
        ends_E,
        num_outputs,
        depth,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        enable_fp_fusion=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def find_rows(tile, ends, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a tile of rows (num_experts: none), its first row, and the end of the expert's run."""
    expert_E = tl.arange(0, EXPERTS)
    inside = expert_E < num_experts
    ends_E = tl.load(ends + expert_E, mask=inside, other=0)
    begins_E = tl.load(ends + expert_E - 1, mask=inside & (expert_E > 0), other=0)
    tiles_E = tl.where(inside, (ends_E - begins_E + ROWS - 1) // ROWS, 0)
    last_tiles_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum(((last_tiles_E <= tile) & inside).to(tl.int32), 0)
    own_E = expert_E == expert
    first_tile = tl.sum(tl.where(own_E, last_tiles_E - tiles_E, 0), 0)
    begin = tl.sum(tl.where(own_E, begins_E, 0), 0)
    return expert, begin + (tile - first_tile) * ROWS, tl.sum(tl.where(own_E, ends_E, 0), 0)


@triton.jit
def product_kernel(
    x, weight, y, ends, num_experts, num_outputs, depth, expert_stride, output_stride, column_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, first_row, end = find_rows(tl.program_id(0), ends, num_experts, ROWS, EXPERTS)
    if expert < num_experts:
        row = first_row + tl.arange(0, ROWS)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        column = tl.arange(0, COLUMNS)
        # Rows and outputs beyond the end repeat the last one instead of a mask: their results are dropped.
        inputs = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * depth + column[None, :]
        own = weight + expert.to(tl.int64) * expert_stride
        weights = own + tl.minimum(output, num_outputs - 1)[:, None] * output_stride + column[None, :] * column_stride
        sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for begin in range(0, depth, COLUMNS):
            inside = (begin + column < depth)[None, :]
            inputs_SC = tl.load(inputs + begin, mask=inside, other=0.0)
            weights_OC = tl.load(weights + begin * column_stride, mask=inside, other=0.0)
            sums = tl.dot(inputs_SC, tl.trans(weights_OC), sums, input_precision="ieee")
        place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
        tl.store(y + place, sums.to(y.dtype.element_ty), mask=(row < end)[:, None] & (output < num_outputs)[None, :])


@triton.jit
def weight_gradient_kernel(
    grad, x, into, ends, num_outputs, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([OUTPUTS, COLUMNS], dtype=tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None]
        place = row.to(tl.int64)[:, None]
        grad_SO = tl.load(
            grad + place * num_outputs + output[None, :], mask=inside & (output < num_outputs)[None, :], other=0.0
        )
        x_SC = tl.load(x + place * depth + column[None, :], mask=inside & (column < depth)[None, :], other=0.0)
        sums = tl.dot(tl.trans(grad_SO), x_SC, sums, input_precision="ieee")
    place = (expert.to(tl.int64) * num_outputs + output)[:, None] * depth + column[None, :]
    tl.store(
        into + place,
        sums.to(into.dtype.element_ty),
        mask=(output < num_outputs)[:, None] & (column < depth)[None, :],
    )
