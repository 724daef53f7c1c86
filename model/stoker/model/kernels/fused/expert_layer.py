"""A whole layer of experts for serving: choose, sort and multiply on the device, in four to six kernels.

Few tokens go pair by pair (`expert_pairs`), more go expert by expert (`expert_products`). Nothing waits for the device,
so graphs hold all of it. Without gradient only; sums have a fixed order, but that order depends on the number of rows,
so the deterministic mode keeps to the single operations. T tokens, D hidden.

Called through `Ops`.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.expert_order import order_rows
from stoker.model.kernels.fused.expert_pairs import pair_products
from stoker.model.kernels.fused.expert_products import grouped_products
from stoker.model.kernels.fused.expert_router import Choices, route_few, route_rows
from stoker.model.kernels.fused.expert_tiles import tiles_for
from stoker.model.kernels.fused.few_rows import RowNorm
from stoker.model.kernels.fused.hosted_layer import products_of_slots
from stoker.model.kernels.fused.norm import add_rms_norm, rms_norm, wants_grad

MAX_PAIR_TOKENS = 2
"""Most tokens whose pairs read weights on their own: on an H200 four are faster expert by expert."""
MIN_PAIR_SHARE = 4
"""Experts there are for each pair of several tokens, at least: then few pairs read the same weights."""
MAX_PAIR_DEPTH = 8192
"""Deepest rows of pairs: a program holds whole rows of weights."""


def experts(x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Tensor | None:
    """Return the weighted sum of each token's experts, y_TD; None where the single operations have to be called.

    `slots_T`: rows below 0 are padding, which get no experts: they are one token many times over, and the experts that
    it chooses would compute as many rows one after the other.
    """
    if not suits(x_TD, weights) or wants_grad(x_TD, *weights[:3]):
        return None
    x_TD = x_TD.contiguous()
    if suits_pairs(x_TD, weights):
        return products_of_pairs(x_TD, route_few(x_TD, None, weights)[0], weights)
    if weights.hosted is not None:
        return products_of_slots(x_TD, route_rows(x_TD, weights), weights, weights.hosted)
    choices = route_rows(x_TD, weights, slots_T)
    order = order_rows(choices.experts, weights.num_own, weights.first)
    tiles = tiles_for(len(order.sources), weights.num_experts, x_TD.dtype)
    return grouped_products(x_TD, choices, order, weights, tiles)


def norm_experts(
    x_TD: Tensor,
    update_TD: Tensor | None,
    norm_D: Tensor,
    eps: float,
    weights: ExpertWeights,
    slots_T: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return (experts(norm(x + update)), x + update); None where the single operations have to be called."""
    tensors = (x_TD, norm_D, *weights[:3]) if update_TD is None else (x_TD, update_TD, norm_D, *weights[:3])
    if not suits(x_TD, weights) or wants_grad(*tensors):
        return None
    if suits_pairs(x_TD, weights):
        choices, few = route_few(x_TD, RowNorm(update_TD, norm_D, eps), weights)
        return products_of_pairs(few.normed, choices, weights), few.total
    normed_TD, total_TD = (
        (rms_norm(x_TD, norm_D, eps), x_TD) if update_TD is None else add_rms_norm(update_TD, x_TD, norm_D, eps)
    )
    y_TD = experts(normed_TD, weights, slots_T)
    assert y_TD is not None
    return y_TD, total_TD


def products_of_pairs(x_TD: Tensor, choices: Choices, weights: ExpertWeights) -> Tensor:
    """Return the weighted sum of few tokens' experts, y_TD."""
    if weights.hosted is None:
        return pair_products(x_TD, choices, weights)
    return products_of_slots(x_TD, choices, weights, weights.hosted, pairs=True)


def suits(x_TD: Tensor, weights: ExpertWeights) -> bool:
    tensors = weights[:3]
    return (
        x_TD.dim() == 2
        and x_TD.numel() > 0
        and weights.width > 0
        and all(tensor.dtype is x_TD.dtype and tensor.is_contiguous() for tensor in tensors)
    )


def suits_pairs(x_TD: Tensor, weights: ExpertWeights) -> bool:
    num_tokens = x_TD.shape[0]
    is_sparse = num_tokens == 1 or num_tokens * weights.num_choices * MIN_PAIR_SHARE <= weights.num_experts
    return is_sparse and num_tokens <= MAX_PAIR_TOKENS and x_TD.shape[1] <= MAX_PAIR_DEPTH
