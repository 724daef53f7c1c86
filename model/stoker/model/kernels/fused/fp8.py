"""Casts to eight bits by Triton, and products by cuBLAS's and CUTLASS's kernels for eight bits (`torch._scaled_mm`).

Hopper's tensor cores take operands in eight bits only in the order in which a product sums, so a cast writes values,
their transpose, or both from one pass. Largest magnitudes are found first: by the kernel that made the matrix, where it
is one of `norm` or `swiglu`, else in a pass of their own.

R rows, C columns, E output size, D input size. Called through `Ops`; the twin is `fp8_twin`.
"""

from __future__ import annotations

import sys
from typing import cast as typed

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels import fp8_linear as layer
from stoker.model.kernels.fp8 import LARGEST, MULTIPLE, SMALLEST_AMAX, Axis, Fp8Tensor, Fp8Weight, noted_amax

TILE_ROWS, TILE_COLUMNS = 128, 128
"""Of one program of a cast: both stores are then whole lines of 128 bytes."""
AMAX_ELEMENTS = 4096
"""That a program of `amax` takes at once."""
AMAX_TURNS = 8
AMAX_ROWS = 64
"""Rows of one program of the columns' largest magnitudes."""
AXES: dict[Axis, int] = {"tensor": 0, "rows": 1, "columns": 2}


def fp8_linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, fp8: Fp8Weight, keeps_casts: bool) -> Tensor:
    kernels = typed("layer.Fp8Kernels", sys.modules[__name__])
    return layer.fp8_linear(kernels, x_TD, weight_ED, bias_E, fp8, keeps_casts)


def amax(x_RC: Tensor, axis: Axis) -> Tensor:
    rows, columns = x_RC.shape
    if not x_RC.numel():
        size = {"tensor": 1, "rows": rows, "columns": columns}[axis]
        return torch.zeros(size, dtype=torch.float32, device=x_RC.device)
    if axis == "tensor":
        if (noted := noted_amax(x_RC)) is not None:
            return noted.amax(0, keepdim=True)
        x_RC = x_RC.detach().contiguous()
        programs = triton.cdiv(x_RC.numel(), AMAX_ELEMENTS * AMAX_TURNS)
        found = torch.empty(programs, dtype=torch.float32, device=x_RC.device)
        tensor_amax_kernel[(programs,)](
            x_RC, found, x_RC.numel(), BLOCK=AMAX_ELEMENTS, TURNS=AMAX_TURNS, num_warps=8, enable_fp_fusion=True
        )
        return found.amax(0, keepdim=True)
    x_RC = x_RC.detach().contiguous()
    if axis == "rows":
        found = torch.empty(rows, dtype=torch.float32, device=x_RC.device)
        block = min(AMAX_ELEMENTS, triton.next_power_of_2(columns))
        row_amax_kernel[(rows,)](x_RC, found, columns, BLOCK=block, num_warps=8, enable_fp_fusion=True)
        return found
    programs = triton.cdiv(rows, AMAX_ROWS)
    found = torch.empty(programs, columns, dtype=torch.float32, device=x_RC.device)
    column_amax_kernel[(triton.cdiv(columns, TILE_COLUMNS), programs)](
        x_RC, found, rows, columns, ROWS=AMAX_ROWS, COLUMNS=TILE_COLUMNS, num_warps=8, enable_fp_fusion=True
    )
    return found.amax(0)


def cast(x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None) -> Fp8Tensor:
    made = into or empty(x_RC.shape[0], x_RC.shape[1], axis, dtype, x_RC.device)
    launch(x_RC, amax, axis, made, None)
    return made


def cast_transposed(x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None) -> Fp8Tensor:
    made = into or empty(x_RC.shape[1], padded(x_RC.shape[0]), axis, dtype, x_RC.device)
    launch(x_RC, amax, axis, None, made)
    return made


def cast_both(
    x_RC: Tensor, amax: Tensor, dtype: torch.dtype, into: tuple[Fp8Tensor, Fp8Tensor] | None
) -> tuple[Fp8Tensor, Fp8Tensor]:
    if into is None:
        first = empty(x_RC.shape[0], x_RC.shape[1], "tensor", dtype, x_RC.device)
        values_CR = torch.empty(x_RC.shape[1], padded(x_RC.shape[0]), dtype=dtype, device=x_RC.device)
        into = first, Fp8Tensor(values_CR, first.scale)
    launch(x_RC, amax, "tensor", *into)
    return into


def padded(rows: int) -> int:
    return -(-rows // MULTIPLE) * MULTIPLE


def empty(rows: int, columns: int, axis: Axis, dtype: torch.dtype, device: torch.device) -> Fp8Tensor:
    scale = torch.empty(1 if axis == "tensor" else rows, dtype=torch.float32, device=device)
    return Fp8Tensor(torch.empty(rows, columns, dtype=dtype, device=device), scale)


def launch(x_RC: Tensor, amax: Tensor, axis: Axis, plain: Fp8Tensor | None, transposed: Fp8Tensor | None) -> None:
    """Write the values, their transpose or both, and the scales."""
    x_RC = x_RC.detach().contiguous()
    rows, columns = x_RC.shape
    first = plain or transposed
    assert first is not None
    ends = rows if transposed is None else transposed.values.shape[1]
    if not columns or not ends:
        return
    cast_kernel[(triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(ends, TILE_ROWS))](
        x_RC,
        amax,
        (plain or first).values,
        (transposed or first).values,
        first.scale,
        rows,
        columns,
        ends,
        AXIS=AXES[axis],
        PLAIN=plain is not None,
        TRANSPOSED=transposed is not None,
        LARGEST=LARGEST[first.values.dtype],
        SMALLEST=SMALLEST_AMAX,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=8,
        enable_fp_fusion=True,
    )


def product(a_nd: Fp8Tensor, b_ed: Fp8Tensor, dtype: torch.dtype, fast: bool, out: Tensor | None) -> Tensor:
    scale_a, scale_b = a_nd.scale, b_ed.scale
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(1, -1)
    a, b = a_nd.values, b_ed.values.t()
    if out is None:
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    made: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)
    return made


@triton.jit(do_not_specialize=["numel"])
def tensor_amax_kernel(x, found, numel, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * TURNS
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.static_range(TURNS):
        place = start + turn * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)))
    tl.store(found + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def row_amax_kernel(x, found, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    tl.store(found + row, tl.max(largest, 0))


@triton.jit(do_not_specialize=["rows"])
def column_amax_kernel(x, found, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    largest = tl.max(tl.abs(values.to(tl.float32)), 0)
    tl.store(found + tl.program_id(1).to(tl.int64) * columns + column, largest, mask=column < columns)


@triton.jit(do_not_specialize=["rows", "ends"])
def cast_kernel(
    x, amax, plain, transposed, scale, rows, columns, ends,
    AXIS: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    if AXIS == 0:
        place = tl.zeros([1], dtype=tl.int64)
        largest = tl.maximum(tl.load(amax + place), SMALLEST)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale + place, tl.div_rn(largest, tl.full([1], LARGEST, tl.float32)))
        factor = tl.div_rn(tl.full([1], LARGEST, tl.float32), largest)[:, None]
    elif AXIS == 1:
        largest = tl.maximum(tl.load(amax + row, mask=row < rows, other=1.0), SMALLEST)
        if tl.program_id(0) == 0:
            tl.store(scale + row, tl.div_rn(largest, tl.full([ROWS], LARGEST, tl.float32)), mask=row < rows)
        factor = tl.div_rn(tl.full([ROWS], LARGEST, tl.float32), largest)[:, None]
    else:
        largest = tl.maximum(tl.load(amax + column, mask=column < columns, other=1.0), SMALLEST)
        if tl.program_id(1) == 0:
            tl.store(scale + column, tl.div_rn(largest, tl.full([COLUMNS], LARGEST, tl.float32)), mask=column < columns)
        factor = tl.div_rn(tl.full([COLUMNS], LARGEST, tl.float32), largest)[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    wide = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    values = (wide * factor).to(plain.dtype.element_ty)
    if PLAIN:
        tl.store(plain + row[:, None] * columns + column[None, :], values, mask=inside)
    if TRANSPOSED:
        written = (row[None, :] < ends) & (column[:, None] < columns)
        tl.store(transposed + column[:, None] * ends + row[None, :], tl.trans(values), mask=written)
