"""The product whose rows do not depend on how many there are or where they stand: every output element is one chain of
tensor-core steps over the columns in order.

Never split over the columns, never padded into another instruction: a row's bits are the same in a batch of 1 and of
8,192. Gradients are plain products. T rows, D input size, E output size.

Called by the deterministic fused kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.model.kernels.fused.alignment import is_aligned
from stoker.model.kernels.fused.linear import Linear

GROUP = 8
"""Row tiles that share the weight's tiles in the cache."""


class Tile(NamedTuple):
    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int


FEW = Tile(32, 16, 256, 2, 4)
FEW_WIDE = Tile(32, 64, 128, 4, 5)
"""Tiling for weights of more outputs than WIDE_OUTPUTS."""
MANY = (Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 4, 6), Tile(64, 64, 128, 4, 4))
"""The first that is not mostly padding and gives ENOUGH programs, or the last."""
ENOUGH = 90
PLAIN = Tile(64, 64, 32, 4, 3)
"""float32, whose products are not for tensor cores."""
WIDE_OUTPUTS = 16384


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    needs_grad = torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad)
    y_TE: Tensor = Linear.apply(x_TD, weight_ED, product) if needs_grad else product(x_TD, weight_ED)
    return y_TE if bias_E is None else y_TE + bias_E


def product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight^T, rounded once to x's dtype."""
    x, weight = x_TD.contiguous(), weight_ED.contiguous()
    num_rows, depth, num_outputs = x.shape[0], x.shape[1], weight.shape[0]
    y_TE = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not y_TE.numel():
        return y_TE
    tile = tile_for(num_rows, num_outputs, x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs),)
    if num_rows > FEW.rows and x.dtype is not torch.float32 and all(is_aligned(tensor) for tensor in (x, weight, y_TE)):
        described_product_kernel[grid](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
            TensorDescriptor.from_tensor(weight, [tile.outputs, tile.columns]),
            TensorDescriptor.from_tensor(y_TE, [tile.rows, tile.outputs]),
            num_rows,
            num_outputs,
            depth,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            COLUMNS=tile.columns,
            GROUP=GROUP,
            enable_fp_fusion=True,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return y_TE
    product_kernel[grid](
        x,
        weight,
        y_TE,
        num_rows,
        num_outputs,
        depth,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        WHOLE=depth % tile.columns == 0,
        GROUP=GROUP,
        enable_fp_fusion=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y_TE


def tile_for(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """Return the tile that was fastest on an H200.

    All give the same bits, as a test holds: the chain over the columns does not depend on the tile.
    """
    if dtype is torch.float32:
        return PLAIN
    if num_rows <= FEW.rows:
        return FEW_WIDE if num_outputs > WIDE_OUTPUTS else FEW
    for tile in MANY:
        programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
        if num_rows > tile.rows // 2 and programs >= ENOUGH:
            return tile
    return MANY[-1]


@triton.jit
def tile_place(program, num_rows, num_outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """First row and first output of a program: GROUP row tiles go through the outputs together."""
    row_tiles, output_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    in_group = GROUP * output_tiles
    first_tile = program // in_group * GROUP
    group_rows = tl.minimum(row_tiles - first_tile, GROUP)
    place = program % in_group
    return (first_tile + place % group_rows) * ROWS, place // group_rows * OUTPUTS


@triton.jit(do_not_specialize=["num_rows"])
def described_product_kernel(
    x, weight, y, num_rows, num_outputs, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`product_kernel` on tensor descriptors: what lies outside reads as zero and is not written."""
    row, output = tile_place(tl.program_id(0), num_rows, num_outputs, ROWS, OUTPUTS, GROUP)
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for begin in range(0, depth, COLUMNS):
        sums = tl.dot(x.load([row, begin]), tl.trans(weight.load([output, begin])), sums)
    y.store([row, output], sums.to(y.dtype))


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x, weight, y, num_rows, num_outputs, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    first_row, first_output = tile_place(tl.program_id(0), num_rows, num_outputs, ROWS, OUTPUTS, GROUP)
    row = first_row + tl.arange(0, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    # Rows and outputs beyond the end repeat the last one instead of a mask: their results are dropped.
    inputs = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * depth + column[None, :]
    weights = weight + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * depth + column[None, :]
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for begin in range(0, depth, COLUMNS):
        if WHOLE:
            inputs_TC = tl.load(inputs + begin)
            weights_EC = tl.load(weights + begin)
        else:
            inside = (begin + column < depth)[None, :]
            inputs_TC = tl.load(inputs + begin, mask=inside, other=0.0)
            weights_EC = tl.load(weights + begin, mask=inside, other=0.0)
        sums = tl.dot(inputs_TC, tl.trans(weights_EC), sums, input_precision="ieee")
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    inside = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(y + place, sums.to(y.dtype.element_ty), mask=inside)
