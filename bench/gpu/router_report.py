"""How routers share a step of decodes: distinct experts of a layer, and the fullest expert against the mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.experts import Experts
from stoker.model.kernels.expert_rows import count_rows


@contextmanager
def counted_routes(decoder: Decoder, num_tokens: int) -> Iterator[list[Tensor]]:
    """Within the block, collect the rows of each expert, [E], of each layer's pass of so many tokens.

    Passes must not be graphs. The layers compute as before.
    """
    counts: list[Tensor] = []
    layers = [module for module in decoder.modules() if isinstance(module, Experts)]
    for layer in layers:
        layer.forward = counting(layer, num_tokens, counts)  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        for layer in layers:
            del layer.forward


def counting(layer: Experts, num_tokens: int, counts: list[Tensor]) -> Any:
    original = layer.forward

    def forward(norm: Any, x_TD: Tensor, attended_TD: Tensor, aux: Any = None) -> tuple[Tensor, Tensor]:
        if x_TD.shape[0] == num_tokens:
            routes = layer.choose(norm.of_sum(x_TD, attended_TD)[0], None)
            counts.append(count_rows(routes.experts.flatten(), layer.num_experts))
        return original(norm, x_TD, attended_TD, aux)

    return forward


def report(counts: list[Tensor]) -> dict[str, float]:
    """Return means and extremes over layers and steps."""
    counts_NE = torch.stack(counts).float().cpu()
    distinct_N = (counts_NE > 0).sum(1).tolist()
    fullest_N = (counts_NE.amax(1) / counts_NE.mean(1)).tolist()
    return {
        "distinct_experts": round(statistics.mean(distinct_N), 1),
        "fewest_distinct_experts": min(distinct_N),
        "fullest_expert_of_mean": round(statistics.mean(fullest_N), 2),
        "fullest_expert_of_mean_worst": round(max(fullest_N), 2),
    }
