"""Products of several rows with weights, alone or with SwiGLU behind them, in a decode step.

Such a product is as fast as its weights come, which are read once: they are the left operand, so that all rows are the
columns of one result of the tensor cores. A weight with few outputs is cut along its depth, too, so that every
multiprocessor reads; the program that finishes an output tile last adds the parts, in their order. Before a program
waits for the kernel before, it asks the first weights of each output into the cache.

Without gradient only; a row's bits depend on how many rows there are. T rows, D input size, E output size, F columns of
one half.

Called by `linear` and `norm_linear`; `row_tiles` chooses weights and tiles.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.model.kernels.fused.alignment import is_aligned
from stoker.model.kernels.fused.launch import HOPPER, overlap
from stoker.model.kernels.fused.row_tiles import MULTIPROCESSORS, RowTile, row_tile

MOST_SPLIT_TILES = 4096
"""Most output tiles of a weight that is cut along its depth."""
AHEAD = tl.constexpr(128)
"""Columns of each output that are asked for ahead."""
LINE = tl.constexpr(64)
"""Columns in one line of the cache."""
ASK = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


def tile_for(x_TD: Tensor, weight_ED: Tensor, *, is_gated: bool = False) -> RowTile | None:
    """Return the tile with which `several_rows` is faster than cuBLAS on this device; None: it is not."""
    if x_TD.dim() != 2 or not x_TD.shape[0] or x_TD.dtype is not weight_ED.dtype or x_TD.element_size() != 2:
        return None
    tile = row_tile(x_TD.shape[0], weight_ED.shape[0] // (2 if is_gated else 1), x_TD.shape[1], is_gated)
    if tile is None or not is_measured(x_TD.device):
        return None
    return tile if all(one.is_contiguous() and is_aligned(one) for one in (x_TD, weight_ED)) else None


@functools.cache
def is_measured(device: torch.device) -> bool:
    """Whether the tiles are made for this device. One that is only compiled for counts as one of an H200."""
    if triton.knobs.runtime.interpret or triton.runtime.driver.active.get_current_target().arch != HOPPER:
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).multi_processor_count == MULTIPROCESSORS


def several_rows(x_TD: Tensor, weight_ED: Tensor, tile: RowTile, *, is_gated: bool = False) -> Tensor:
    """Return x @ weight^T, or silu(gate) * up of its halves. Both operands lie whole and aligned, 16 bits wide."""
    num_rows, depth = x_TD.shape
    num_outputs = weight_ED.shape[0] // (2 if is_gated else 1)
    y_TE = x_TD.new_empty(num_rows, num_outputs)
    tiles = triton.cdiv(num_outputs, tile.outputs)
    several_rows_kernel[(tiles * tile.splits,)](
        TensorDescriptor.from_tensor(x_TD, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(weight_ED, [tile.outputs, tile.columns]),
        weight_ED,
        y_TE,
        parts_of(x_TD, tiles, tile, is_gated) if tile.splits > 1 else None,
        arrivals(x_TD.device) if tile.splits > 1 else None,
        num_rows,
        num_outputs,
        depth,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        SPLITS=tile.splits,
        HALVES=2 if is_gated else 1,
        enable_fp_fusion=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(),
    )
    return y_TE


def parts_of(x_TD: Tensor, tiles: int, tile: RowTile, is_gated: bool) -> Tensor:
    """Return memory for the sums of each split, [splits, halves, rows, outputs]."""
    assert tiles <= MOST_SPLIT_TILES
    shape = tile.splits, 2 if is_gated else 1, tile.rows, tiles * tile.outputs
    return torch.empty(shape, dtype=torch.float32, device=x_TD.device)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Return the numbers of programs that have finished each output tile: zero between two launches.

    Launches that follow one another on a stream share them.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("several_rows: a graph is captured before the first launch")
    return torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)


@triton.jit
def ask_ahead(weight, output, begin, num_outputs, depth, OUTPUTS: tl.constexpr, HALVES: tl.constexpr):
    """Ask the first weights of a program's outputs into the L2 cache; the last ones twice where there are fewer."""
    LINES: tl.constexpr = AHEAD // LINE
    line = tl.arange(0, OUTPUTS * LINES)
    own = tl.minimum(output + line // LINES, num_outputs - 1).to(tl.int64)
    column = tl.minimum(begin + line % LINES * LINE, depth - 1)
    for half in tl.static_range(HALVES):
        place = (weight + (own + half * num_outputs) * depth + column).to(tl.int64)
        tl.inline_asm_elementwise(ASK, "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def added_parts(parts, own, size, SPLITS: tl.constexpr, HALVES: tl.constexpr, HALF: tl.constexpr):
    """The sum over all splits, in their order. Parts come from other multiprocessors, so past this one's cache."""
    sums = tl.load(parts + own + HALF * size, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(parts + own + (split * HALVES + HALF) * size, cache_modifier=".cg")
    return sums


@triton.jit
def store_rows(y, sums_OR, ups_OR, row, output, num_rows, num_outputs, HALVES: tl.constexpr):
    """Store the sums, or silu(gate) * up of both halves' sums, transposed."""
    kind = y.dtype.element_ty
    if HALVES == 2:
        gate_OR = sums_OR.to(kind).to(tl.float32)
        sums_OR = gate_OR / (1.0 + tl.exp(-gate_OR)) * ups_OR.to(kind).to(tl.float32)
    inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    tl.store(y + row[None, :] * num_outputs + output[:, None], sums_OR.to(kind), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def several_rows_kernel(
    x, weight, weights, y, parts, arrived, num_rows, num_outputs, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HALVES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`weight` describes `weights`: what lies outside reads as zero."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    first = tile * OUTPUTS
    steps = tl.cdiv(tl.cdiv(depth, COLUMNS), SPLITS)
    begin = split * steps * COLUMNS
    if OVERLAPS:
        gdc_launch_dependents()
        ask_ahead(weights, first, begin, num_outputs, depth, OUTPUTS, HALVES)
        gdc_wait()
    sums_OR = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    ups_OR = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for place in range(begin, tl.minimum(begin + steps * COLUMNS, depth), COLUMNS):
        x_CR = tl.trans(x.load([0, place]))
        sums_OR = tl.dot(weight.load([first, place]), x_CR, sums_OR)
        if HALVES == 2:
            ups_OR = tl.dot(weight.load([num_outputs + first, place]), x_CR, ups_OR)
    output, row = first + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    if SPLITS == 1:
        store_rows(y, sums_OR, ups_OR, row, output, num_rows, num_outputs, HALVES)
    else:
        width = tl.num_programs(0) // SPLITS * OUTPUTS
        size, own = ROWS * width, row[None, :] * width + output[:, None]
        tl.store(parts + own + split * HALVES * size, sums_OR)
        if HALVES == 2:
            tl.store(parts + own + (split * HALVES + 1) * size, ups_OR)
        tl.debug_barrier()  # all threads' parts are written before one of them says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.atomic_xchg(arrived + tile, 0)  # ready for the next launch
            sums_OR = added_parts(parts, own, size, SPLITS, HALVES, 0)
            if HALVES == 2:
                ups_OR = added_parts(parts, own, size, SPLITS, HALVES, 1)
            store_rows(y, sums_OR, ups_OR, row, output, num_rows, num_outputs, HALVES)
