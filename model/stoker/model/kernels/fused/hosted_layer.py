"""The products of a layer whose experts' weights are in host memory: those in slots on the device, round by round.

A choice's place (round and slot) stands in for its expert, so the kernels are those of a layer whose experts are all
on the device, with as many experts as slots. Each row's sums are the same ones, in the same order. T tokens, K experts
of a token, S = T * K rows, D hidden.

Called by `expert_layer`. The host waits for the choice, so no graph can hold it.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.hosted_experts import HostedExperts, Turn
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.expert_order import order_rows
from stoker.model.kernels.fused.expert_pairs import pair_products
from stoker.model.kernels.fused.expert_products import grouped_down, grouped_gate_up, sum_choices
from stoker.model.kernels.fused.expert_router import Choices
from stoker.model.kernels.fused.expert_tiles import tiles_for


def products_of_slots(
    x_TD: Tensor, choices: Choices, weights: ExpertWeights, hosted: HostedExperts, *, pairs: bool = False
) -> Tensor:
    """Return the weighted sum of each token's experts, y_TD. `pairs`: pair by pair, where one round is enough."""
    turn = hosted.turn(choices.experts)
    gate_up, down = hosted.in_slots
    slots = weights._replace(gate_up=gate_up, down=down, first=0, hosted=None)
    placed = Choices(hosted.keys(choices.experts, turn), choices.weights)
    if pairs and len(turn.rounds) == 1:
        for _ in hosted.arriving(turn):
            pass
        return pair_products(x_TD, placed, slots)
    y_SD = x_TD.new_empty(placed.experts.numel(), weights.hidden)
    compute_rounds(x_TD, placed, slots, hosted, turn, y_SD)
    return sum_choices(y_SD, placed, 0, len(turn.rounds) * hosted.num_slots)


def compute_rounds(
    x_TD: Tensor, placed: Choices, slots: ExpertWeights, hosted: HostedExperts, turn: Turn, y_SD: Tensor
) -> None:
    """Fill the rows of y_SD, in the order of tokens and choices, whose experts this rank holds."""
    tiles = tiles_for(placed.experts.numel(), slots.num_experts, x_TD.dtype)
    for number, _ in enumerate(hosted.arriving(turn)):
        order = order_rows(placed.experts, hosted.num_slots, number * hosted.num_slots)
        grouped_down(grouped_gate_up(x_TD, order, slots, tiles.gate_up), order, slots, tiles.down, y_SD)
