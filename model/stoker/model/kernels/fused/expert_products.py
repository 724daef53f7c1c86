"""Grouped products of experts for serving: gate, up and SwiGLU in one kernel, down in another, then the weighted sum.

The weights' tile is the left operand and rows are the columns of the result, so that few rows still fill the tensor
cores. Nothing waits for the device: programs read where their expert's rows begin and end. The sum over a token's
experts is made in the order of its choices, without atomics. T tokens, K experts of a token, S = T * K rows, D hidden,
F width of an expert, E experts.

Called by `expert_layer`; the twins are `Ops.grouped_linear`, `swiglu` and `combine`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.alignment import is_aligned
from stoker.model.kernels.fused.expert_order import RowOrder
from stoker.model.kernels.fused.expert_router import Choices
from stoker.model.kernels.fused.expert_tiles import ExpertTile, LayerTiles
from stoker.model.kernels.fused.grouped_linear import find_rows
from stoker.model.kernels.fused.launch import overlap, wait_for_last

SUM_BLOCK = 1024
"""Columns of one program of the weighted sum."""


def grouped_products(
    x_TD: Tensor, choices: Choices, order: RowOrder, weights: ExpertWeights, tiles: LayerTiles
) -> Tensor:
    """Return the weighted sum of each token's experts, y_TD."""
    activated_SF = grouped_gate_up(x_TD, order, weights, tiles.gate_up)
    y_SD = grouped_down(activated_SF, order, weights, tiles.down)
    return sum_choices(y_SD, choices, weights.first, weights.num_own)


def grouped_gate_up(x_TD: Tensor, order: RowOrder, weights: ExpertWeights, tile: ExpertTile) -> Tensor:
    """Return silu(gate) * up of each row in the order of experts, activated_SF."""
    num_rows = len(order.sources)
    activated_SF = x_TD.new_empty(num_rows, weights.width)
    described = tile.described and is_aligned(weights.gate_up)
    gate_up_kernel[grid(num_rows, weights.width, weights, tile)](
        x_TD,
        operand(weights.gate_up, tile, described),
        activated_SF,
        order.sources,
        order.ends,
        weights.num_own,
        weights.num_choices,
        weights.width,
        weights.hidden,
        **constants(weights, tile, weights.hidden, described),
    )
    return activated_SF


def grouped_down(
    activated_SF: Tensor, order: RowOrder, weights: ExpertWeights, tile: ExpertTile, into: Tensor | None = None
) -> Tensor:
    """Return each choice's result in the order of tokens and choices, y_SD: `into`, if given, of which only the rows of
    the order are written."""
    num_rows = len(order.sources)
    y_SD = activated_SF.new_empty(num_rows, weights.hidden) if into is None else into
    described = tile.described and is_aligned(weights.down)
    down_kernel[grid(num_rows, weights.hidden, weights, tile)](
        activated_SF,
        operand(weights.down, tile, described),
        y_SD,
        order.sources,
        order.ends,
        weights.num_own,
        weights.hidden,
        weights.width,
        **constants(weights, tile, weights.width, described),
    )
    return y_SD


def sum_choices(y_SD: Tensor, choices: Choices, first: int, num_own: int) -> Tensor:
    """Return the weighted sum over each token's choices, y_TD, added in float32.

    Only those count that were computed: of `num_own` experts from `first` on.
    """
    num_tokens, num_choices = choices.weights.shape
    y_TD = y_SD.new_empty(num_tokens, y_SD.shape[1])
    sum_kernel[(num_tokens, triton.cdiv(y_SD.shape[1], SUM_BLOCK))](
        y_SD,
        choices.experts,
        choices.weights,
        y_TD,
        y_SD.shape[1],
        first,
        num_own,
        CHOICES=num_choices,
        BLOCK=SUM_BLOCK,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )
    return y_TD


def grid(num_rows: int, num_outputs: int, weights: ExpertWeights, tile: ExpertTile) -> tuple[int]:
    """Programs for the tiles of rows that there may be at most, or for the experts, times those of outputs."""
    # Each expert's last tile may be a partial one. Programs beyond the last tile end at once.
    most_tiles = min(num_rows, num_rows // tile.rows + weights.num_own)
    runs = most_tiles if tile.mapped else weights.num_own
    return (runs * triton.cdiv(num_outputs, tile.outputs),)


def operand(weight_RD: Tensor, tile: ExpertTile, described: bool) -> Any:
    return TensorDescriptor.from_tensor(weight_RD, [tile.outputs, tile.columns]) if described else weight_RD


def constants(weights: ExpertWeights, tile: ExpertTile, depth: int, described: bool) -> dict[str, Any]:
    return {
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "COLUMNS": tile.columns,
        "EXPERTS": triton.next_power_of_2(weights.num_own),
        "MAPPED": tile.mapped,
        "DESCRIBED": described,
        "WHOLE": depth % tile.columns == 0,
        "enable_fp_fusion": True,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlap(),
    }


@triton.jit
def run_of_rows(run, ends, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr, MAPPED: tl.constexpr):
    """The expert of a program, and the begin and end of its rows; none where the program is beyond the last tile."""
    if MAPPED:
        expert, begin, end = find_rows(run, ends, num_experts, ROWS, EXPERTS)
        end = tl.minimum(begin + ROWS, end)
    else:
        expert = run
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
    return expert, begin, end


@triton.jit
def load_weights(
    weight, first_row, row_O, row_stride, column_C, begin, depth, DESCRIBED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A tile of weights whose rows begin at `first_row`; `row_O`: the same rows, none beyond the expert's last."""
    if DESCRIBED:
        tile_OC = weight.load([first_row, begin])
    elif WHOLE:
        tile_OC = tl.load(weight + row_O[:, None] * row_stride + (begin + column_C)[None, :])
    else:
        inside = (begin + column_C < depth)[None, :]
        tile_OC = tl.load(weight + row_O[:, None] * row_stride + (begin + column_C)[None, :], mask=inside, other=0.0)
    return tile_OC


@triton.jit
def load_rows(rows, begin, column_C, depth, WHOLE: tl.constexpr):
    if WHOLE:
        tile_RC = tl.load(rows + begin)
    else:
        tile_RC = tl.load(rows + begin, mask=(begin + column_C < depth)[None, :], other=0.0)
    return tile_RC


@triton.jit
def gate_up_kernel(
    x, gate_up, activated, sources, ends, num_experts, num_choices, width, depth,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, MAPPED: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    output_tiles = tl.cdiv(width, OUTPUTS)
    expert, first, end = run_of_rows(tl.program_id(0) // output_tiles, ends, num_experts, ROWS, EXPERTS, MAPPED)
    first_output = tl.program_id(0) % output_tiles * OUTPUTS
    output, column = first_output + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    gate = expert * 2 * width
    # Rows and outputs beyond the end repeat the last one instead of a mask: their results are dropped.
    gates_O = gate.to(tl.int64) + tl.minimum(output, width - 1)
    for begin in range(first, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        source = tl.load(sources + tl.minimum(row, end - 1))
        inputs = x + (source // num_choices).to(tl.int64)[:, None] * depth + column[None, :]
        gate_OR = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        up_OR = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        for place in range(0, depth, COLUMNS):
            gate_OC = load_weights(gate_up, gate + first_output, gates_O, depth, column, place, depth, DESCRIBED, WHOLE)
            up_OC = load_weights(
                gate_up, gate + width + first_output, gates_O + width, depth, column, place, depth, DESCRIBED, WHOLE
            )
            x_CR = tl.trans(load_rows(inputs, place, column, depth, WHOLE))
            gate_OR = tl.dot(gate_OC, x_CR, gate_OR, input_precision="ieee")
            up_OR = tl.dot(up_OC, x_CR, up_OR, input_precision="ieee")
        kind = activated.dtype.element_ty
        gate_OR = gate_OR.to(kind).to(tl.float32)
        value_OR = gate_OR / (1.0 + tl.exp(-gate_OR)) * up_OR.to(kind).to(tl.float32)
        into = activated + row.to(tl.int64)[None, :] * width + output[:, None]
        tl.store(into, value_OR.to(kind), mask=(row < end)[None, :] & (output < width)[:, None])


@triton.jit
def down_kernel(
    activated, down, y, sources, ends, num_experts, num_outputs, width,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, MAPPED: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    expert, first, end = run_of_rows(tl.program_id(0) // output_tiles, ends, num_experts, ROWS, EXPERTS, MAPPED)
    first_output = tl.program_id(0) % output_tiles * OUTPUTS
    output, column = first_output + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    own_O = expert.to(tl.int64) * num_outputs + tl.minimum(output, num_outputs - 1)
    for begin in range(first, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        source = tl.load(sources + tl.minimum(row, end - 1))
        inputs = activated + tl.minimum(row, end - 1).to(tl.int64)[:, None] * width + column[None, :]
        sums_OR = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        for place in range(0, width, COLUMNS):
            down_OC = load_weights(
                down, expert * num_outputs + first_output, own_O, width, column, place, width, DESCRIBED, WHOLE
            )
            inputs_RC = load_rows(inputs, place, column, width, WHOLE)
            sums_OR = tl.dot(down_OC, tl.trans(inputs_RC), sums_OR, input_precision="ieee")
        into = y + source.to(tl.int64)[None, :] * num_outputs + output[:, None]
        tl.store(into, sums_OR.to(y.dtype.element_ty), mask=(row < end)[None, :] & (output < num_outputs)[:, None])


@triton.jit
def sum_kernel(
    y, experts, weights, result, columns, first, num_own,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(experts + token * CHOICES + choice) - first
        end = tl.where((expert >= 0) & (expert < num_own), columns, 0)
        value = tl.load(y + (token * CHOICES + choice) * columns + column, mask=column < end, other=0.0).to(tl.float32)
        total += value * tl.load(weights + token * CHOICES + choice)
    tl.store(result + token * columns + column, total.to(result.dtype.element_ty), mask=inside)
