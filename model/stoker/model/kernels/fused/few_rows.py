"""Products of few rows with weights, alone or with norm, sum and SwiGLU around them in a decode step.

Such a product is as fast as its weights come. A program therefore asks for all weights of its outputs at once, and does
so before it waits for the kernel before; the rows are read, summed and normalised by every program anew. T rows, D
input size, E output size, F columns of one half.

Called by `linear`, `logits` and `norm_linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stoker.model.kernels.fused.launch import overlap

MAX_WEIGHT_BYTES = {1: 2**31, 2: 64 * 2**20, 3: 7 * 2**20, 4: 7 * 2**20}
"""Largest weights, by the number of rows, with which a decode step on an H200 was faster than with cuBLAS."""
MAX_DEPTH = 16384
DEPTH_ALIGNMENT = 16
"""Elements: a thread loads that many of a row at once."""
MAX_NORM_DEPTH = 2048
"""Deepest rows that the product normalises itself.

Their normalisation takes the registers in which the first weights would wait: a decode step of 1,024 columns won 10 %,
of 2,048 6 %, one of 3,072 lost 12 %.
"""


class Tile(NamedTuple):
    outputs: int
    warps: int


class RowNorm(NamedTuple):
    """The operation on the rows before the product: rms_norm(x + update, weight, eps)."""

    update: Tensor | None
    weight: Tensor
    eps: float


def tile_for(depth: int, has_norm: bool, is_gated: bool) -> Tile:
    """Return the best tiling within whole decode steps on an H200: 32 to 64 weights per thread.

    A kernel's own time is no guide there. `depth` is rounded up to a power of two.
    """
    if depth > 1024:
        return Tile(2, max(4, depth // 1024))
    return Tile(2, 2) if has_norm and not is_gated else Tile(4, 4)


def suits_rows(x_TD: Tensor, weight_ED: Tensor) -> bool:
    return (
        weight_ED.nbytes <= MAX_WEIGHT_BYTES.get(x_TD.shape[0], 0)
        and weight_ED.numel() > 0
        and x_TD.dim() == 2
        and x_TD.dtype is weight_ED.dtype
        and weight_ED.is_contiguous()
        and weight_ED.shape[1] <= MAX_DEPTH
        and weight_ED.shape[1] % DEPTH_ALIGNMENT == 0
    )


def few_rows(
    x_TD: Tensor, weight_ED: Tensor, *, is_gated: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x @ weight^T, or silu(gate) * up of its halves. `out_dtype`: another dtype than x's."""
    return launch(x_TD, weight_ED, None, is_gated, out_dtype)[0]


def few_normed_rows(x_TD: Tensor, norm: RowNorm, weight_ED: Tensor, *, is_gated: bool = False) -> tuple[Tensor, Tensor]:
    """Return the same of rms_norm(x + update), and x + update.

    Sum and norm are rounded to x's dtype, as if they were stored in between.
    """
    return launch(x_TD, weight_ED, norm, is_gated)


def launch(
    x_TD: Tensor, weight_ED: Tensor, norm: RowNorm | None, is_gated: bool, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, depth = x_TD.shape
    num_outputs = weight_ED.shape[0] // (2 if is_gated else 1)
    x, update = x_TD.contiguous(), None if norm is None or norm.update is None else norm.update.contiguous()
    y_TE = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    total_TD = x if update is None else torch.empty_like(x)
    block = max(512, triton.next_power_of_2(depth))
    tile = tile_for(block, norm is not None, is_gated)
    few_rows_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x,
        update,
        None if norm is None else norm.weight,
        weight_ED,
        y_TE,
        total_TD,
        num_outputs,
        depth,
        0.0 if norm is None else norm.eps,
        ROWS=num_rows,
        HAS_UPDATE=update is not None,
        HAS_NORM=norm is not None,
        IS_GATED=is_gated,
        OUTPUTS=tile.outputs,
        DEPTH=block,
        enable_fp_fusion=True,
        num_warps=tile.warps,
        **overlap(),
    )
    return y_TE, total_TD


@triton.jit
def summed_row(x, update, total, row, depth, column, inside, HAS_UPDATE: tl.constexpr):
    """A row of x + update in float32, rounded as if it were stored in between; the first program stores it."""
    row_D = tl.load(x + row * depth + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        row_D += tl.load(update + row * depth + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row_D.to(total.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + row * depth + column, rounded, mask=inside)
        row_D = rounded.to(tl.float32)
    return row_D


@triton.jit
def normed_row(row_D, scaling_D, depth, eps):
    """rms_norm of a row, in float32."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(row_D * row_D, 0) / depth + eps)
    return row_D * scale * scaling_D.to(tl.float32)


@triton.jit
def few_rows_kernel(
    x, update, norm, weight, y, total, num_outputs, depth, eps,
    ROWS: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Read weights before waiting for the last kernel.

    No kernel writes them, and between a change of weights and this one lies the embedding, an ordinary launch.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, DEPTH)
    has_output, inside = output < num_outputs, column < depth
    place = weight + output.to(tl.int64)[:, None] * depth + column[None, :]
    is_weight = has_output[:, None] & inside[None, :]
    weights_ED = tl.load(place, mask=is_weight, other=0.0, eviction_policy="evict_first")
    if IS_GATED:
        ups = place + depth.to(tl.int64) * num_outputs
        ups_ED = tl.load(ups, mask=is_weight, other=0.0, eviction_policy="evict_first")
    if HAS_NORM:
        scaling_D = tl.load(norm + column, mask=inside, other=0.0)
    if OVERLAPS:
        gdc_wait()
    for row in tl.static_range(ROWS):
        row_D = summed_row(x, update, total, row, depth, column, inside, HAS_UPDATE)
        if HAS_NORM:
            row_D = normed_row(row_D, scaling_D, depth, eps).to(x.dtype.element_ty).to(tl.float32)
        result_E = tl.sum(weights_ED.to(tl.float32) * row_D[None, :], 1)
        if IS_GATED:
            gate = result_E.to(y.dtype.element_ty).to(tl.float32)
            up = tl.sum(ups_ED.to(tl.float32) * row_D[None, :], 1).to(y.dtype.element_ty).to(tl.float32)
            result_E = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y + row * num_outputs + output, result_E.to(y.dtype.element_ty), mask=has_output)
