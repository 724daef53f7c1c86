"""Products of experts for very few tokens: each (token, expert) pair reads the expert's weights on its own.

Such products are as fast as their weights come, and few tokens share few experts. Gate, up and SwiGLU are one kernel,
down and the weighted sum over a token's experts the other; every sum has a fixed order. T tokens, K experts of a token,
P = T * K pairs, D hidden, F width of an expert.

Called by `expert_layer`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.expert_router import Choices
from stoker.model.kernels.fused.launch import overlap, wait_for_last


class PairTile(NamedTuple):
    outputs: int
    warps: int
    columns: int = 256
    """Columns of each expert that are read at once; the gate reads whole rows."""


GATE_UP = PairTile(2, 4)
DOWN = PairTile(2, 4)


def pair_products(
    x_TD: Tensor, choices: Choices, weights: ExpertWeights, gate_up: PairTile = GATE_UP, down: PairTile = DOWN
) -> Tensor:
    """Return the weighted sum of each token's experts, y_TD."""
    return pair_down(pair_gate_up(x_TD, choices, weights, gate_up), choices, weights, down)


def pair_gate_up(x_TD: Tensor, choices: Choices, weights: ExpertWeights, tile: PairTile = GATE_UP) -> Tensor:
    """Return silu(gate) * up of each pair, activated_PF."""
    depth, width, pairs = weights.hidden, weights.width, choices.experts.numel()
    activated_PF, block = x_TD.new_empty(pairs, width), max(512, triton.next_power_of_2(depth))
    pair_gate_up_kernel[(triton.cdiv(width, tile.outputs), pairs)](
        x_TD,
        weights.gate_up,
        choices.experts,
        activated_PF,
        weights.num_choices,
        width,
        depth,
        weights.first,
        weights.num_own,
        OUTPUTS=tile.outputs,
        DEPTH=block,
        enable_fp_fusion=True,
        num_warps=max(tile.warps, block // 1024),
        **overlap(),
    )
    return activated_PF


def pair_down(activated_PF: Tensor, choices: Choices, weights: ExpertWeights, tile: PairTile = DOWN) -> Tensor:
    """Return the weighted sum of each token's experts, y_TD."""
    num_tokens, width = len(choices.experts), weights.width
    y_TD = activated_PF.new_empty(num_tokens, weights.hidden)
    columns = min(tile.columns, triton.next_power_of_2(width))
    pair_down_kernel[(triton.cdiv(weights.hidden, tile.outputs), num_tokens)](
        activated_PF,
        weights.down,
        choices.experts,
        choices.weights,
        y_TD,
        weights.hidden,
        width,
        weights.first,
        weights.num_own,
        CHOICES=weights.num_choices,
        PLACES=triton.next_power_of_2(weights.num_choices),
        OUTPUTS=tile.outputs,
        COLUMNS=columns,
        TURNS=triton.cdiv(width, columns),
        WHOLE=width % columns == 0,
        enable_fp_fusion=True,
        num_warps=tile.warps,
        **overlap(),
    )
    return y_TD


@triton.jit
def pair_gate_up_kernel(
    x, gate_up, experts, activated, num_choices, width, depth, first, num_own,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    pair = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, DEPTH)
    inside = column < depth
    expert = tl.load(experts + pair).to(tl.int64) - first
    is_here = (expert >= 0) & (expert < num_own)
    has_output = output < tl.where(is_here, width, 0)
    gates = gate_up + (expert * 2 * width + output)[:, None] * depth + column[None, :]
    is_weight = has_output[:, None] & inside[None, :]
    gates_OD = tl.load(gates, mask=is_weight, other=0.0, eviction_policy="evict_first")
    ups_OD = tl.load(gates + width.to(tl.int64) * depth, mask=is_weight, other=0.0, eviction_policy="evict_first")
    x_D = tl.load(x + pair // num_choices * depth + column, mask=inside, other=0.0).to(tl.float32)
    kind = activated.dtype.element_ty
    gate = tl.sum(gates_OD.to(tl.float32) * x_D[None, :], 1).to(kind).to(tl.float32)
    up = tl.sum(ups_OD.to(tl.float32) * x_D[None, :], 1).to(kind).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(activated + pair * width + output, value.to(kind), mask=has_output)


@triton.jit
def pair_down_kernel(
    activated, down, experts, weights, y, num_outputs, width, first, num_own,
    CHOICES: tl.constexpr, PLACES: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
    WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """All of a token's experts at once: the sum over them is part of the sum over the columns."""
    wait_for_last(OVERLAPS)
    token = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place_K, column = tl.arange(0, PLACES), tl.arange(0, COLUMNS)
    is_choice, has_output = place_K < CHOICES, output < num_outputs
    experts_K = tl.load(experts + token * CHOICES + place_K, mask=is_choice, other=0).to(tl.int64) - first
    is_choice = is_choice & (experts_K >= 0) & (experts_K < num_own)
    weights_K = tl.load(weights + token * CHOICES + place_K, mask=is_choice, other=0.0)
    rows = (experts_K[None, :] * num_outputs + output[:, None])[:, :, None] * width
    inputs = activated + (token * CHOICES + place_K)[:, None] * width + column[None, :]
    sums_O = tl.zeros([OUTPUTS], dtype=tl.float32)
    for turn in tl.static_range(TURNS):
        is_weight = (has_output[:, None] & is_choice[None, :])[:, :, None]
        is_input = is_choice[:, None]
        if not WHOLE:
            inside = turn * COLUMNS + column < width
            is_weight = is_weight & inside[None, None, :]
            is_input = is_input & inside[None, :]
        places = down + rows + (turn * COLUMNS + column)[None, None, :]
        down_OKC = tl.load(places, mask=is_weight, other=0.0, eviction_policy="evict_first").to(tl.float32)
        inputs_KC = tl.load(inputs + turn * COLUMNS, mask=is_input, other=0.0).to(tl.float32) * weights_K[:, None]
        sums_O += tl.sum(tl.sum(down_OKC * inputs_KC[None, :, :], 2), 1)
    tl.store(y + token * num_outputs + output, sums_O.to(y.dtype.element_ty), mask=has_output)
