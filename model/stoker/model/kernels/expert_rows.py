"""The order of rows in which experts compute: all rows of expert 0, then those of expert 1, and so on.

Every choice of every token is one row, so no token is dropped. Nothing here waits for the device.

T tokens, K experts of a token, E experts, S = T * K rows, D width of a row.

Made by `experts` once per layer, read by the operations of `Ops`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """The experts of each token."""

    weights: Tensor
    """float32 [T, K], differentiable: how much each chosen expert counts."""
    experts: Tensor
    """int64 [T, K]: numbers of the chosen experts, the one with the highest weight first."""


class ExpertRows(NamedTuple):
    """Rows sorted by expert; within an expert in the order of the tokens."""

    sources: Tensor
    """int64 [S]: the choice, a place in the flattened [T * K], of each row."""
    places: Tensor
    """int64 [S]: the row of each choice, the inverse of `sources`."""
    ends: Tensor
    """int32 [E]: where the run of rows of each expert ends."""
    num_choices: int
    """K."""

    @property
    def tokens(self) -> Tensor:
        """The token of each row, [S]."""
        return self.sources // self.num_choices


def sort_rows(experts_TK: Tensor, num_experts: int) -> ExpertRows:
    """Sort the choices by expert."""
    choices_S = experts_TK.flatten()
    sources_S = torch.sort(choices_S, stable=True).indices
    places_S = torch.empty_like(sources_S)
    places_S[sources_S] = torch.arange(len(sources_S), device=sources_S.device)
    ends_E = count_rows(choices_S, num_experts).cumsum(0).to(torch.int32)
    return ExpertRows(sources_S, places_S, ends_E, experts_TK.shape[1])


def sort_own_rows(experts_TK: Tensor, own: range) -> tuple[ExpertRows, Tensor]:
    """Sort the choices by expert, with those of experts outside of the run `own` behind all others.

    Returns:
        The rows, and int32 [len(own)]: where the rows of each own expert end.
    """
    local_TK = experts_TK - own.start
    rows = sort_rows(local_TK.masked_fill((local_TK < 0) | (local_TK >= len(own)), len(own)), len(own) + 1)
    return rows, rows.ends[:-1]


def count_rows(choices_S: Tensor, num_experts: int) -> Tensor:
    """Return the number of rows of each expert, int64 [E]. `bincount` would wait for the device."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=choices_S.device)
    return counts_E.scatter_add_(0, choices_S, torch.ones_like(choices_S))


def gather_rows(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    """Return each row's token, x_SD, differentiable."""
    x_SD: Tensor = GatherRows.apply(x_TD, rows)
    return x_SD


def gather_choices(y_SD: Tensor, rows: ExpertRows) -> Tensor:
    """Return the rows of each token side by side, y_TKD, differentiable."""
    y_UD: Tensor = PermuteRows.apply(y_SD, rows.places, rows.sources)
    return y_UD.view(-1, rows.num_choices, y_SD.shape[1])


class GatherRows(torch.autograd.Function):
    """Forward: a copy of the token for each row. Backward: the sum over a token's rows, always in the same order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: ExpertRows) -> Tensor:
        ctx.save_for_backward(rows.places)  # saved as such, so that recomputation drops it
        ctx.num_choices = rows.num_choices
        return x_TD.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        (places_S,) = ctx.saved_tensors
        grad_TKD = grad_SD.index_select(0, places_S).view(-1, ctx.num_choices, grad_SD.shape[1])
        return grad_TKD.sum(1), None


class PermuteRows(torch.autograd.Function):
    """Forward: rows in the order `places`. Backward: the inverse order, a gather as well."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, places_S: Tensor, sources_S: Tensor) -> Tensor:
        ctx.save_for_backward(sources_S)
        return y_SD.index_select(0, places_S)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (sources_S,) = ctx.saved_tensors
        return grad_SD.index_select(0, sources_S), None, None
