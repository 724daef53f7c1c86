"""Exchange of rows between the ranks of an expert group: each row goes to the rank that holds its expert, and back.

Rows are sorted by expert, and each rank holds a run of experts, so what one rank gets from another is one run of rows.
The number of rows is read on the host once per layer. S rows of this rank, R rows that it computes, D width of a row, E
experts, P ranks of the group.

Called by `experts`; every rank of the group makes the same calls (collective).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Exchange(NamedTuple):
    """The rows of one layer on their way: planned once, used forward and backward."""

    group: ProcessGroup
    sends: list[int]
    """Rows for each rank."""
    receives: list[int]
    """Rows from each rank."""
    order: Tensor
    """int64 [R]: received rows in the order of this rank's experts; within an expert by rank, then as sent."""
    places: Tensor
    """int64 [R]: the inverse of `order`."""
    ends: Tensor
    """int32: where the run of rows of each of this rank's experts ends."""


def plan_exchange(ends_E: Tensor, group: ProcessGroup) -> Exchange:
    """Tell each rank how many rows of each of its experts it gets. `ends_E`: of this rank's rows, over all experts."""
    num_ranks = dist.get_world_size(group)
    counts_PE = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(num_ranks, -1)
    received_PE = torch.empty_like(counts_PE)
    dist.all_to_all_single(received_PE, counts_PE.contiguous(), group=group)
    sends, receives = torch.stack([counts_PE.sum(1), received_PE.sum(1)]).tolist()
    experts = torch.arange(received_PE.shape[1], device=ends_E.device).repeat(num_ranks)
    order = torch.sort(experts.repeat_interleave(received_PE.flatten(), output_size=sum(receives)), stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return Exchange(group, sends, receives, order, places, received_PE.sum(0).cumsum(0).to(torch.int32))


def send_rows(x_SD: Tensor, exchange: Exchange) -> Tensor:
    """Return the rows that this rank's experts compute, x_RD, sorted by expert; differentiable."""
    x_RD: Tensor = SendRows.apply(x_SD, exchange)
    return x_RD


def return_rows(y_RD: Tensor, exchange: Exchange) -> Tensor:
    """Return the results of this rank's own rows, y_SD, in the order in which they were sent; differentiable."""
    y_SD: Tensor = ReturnRows.apply(y_RD, exchange)
    return y_SD


class SendRows(torch.autograd.Function):
    """Forward: all-to-all over the expert group, then the experts' order. Backward: the way back."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, exchange: Exchange) -> Tensor:
        keep_exchange(ctx, exchange)
        return to_experts(x_SD, exchange)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return from_experts(grad_RD, kept_exchange(ctx)), None


class ReturnRows(torch.autograd.Function):
    """Forward: the ranks' order, then all-to-all over the expert group. Backward: the way there."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, exchange: Exchange) -> Tensor:
        keep_exchange(ctx, exchange)
        return from_experts(y_RD, exchange)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        return to_experts(grad_SD, kept_exchange(ctx)), None


def keep_exchange(ctx: Any, exchange: Exchange) -> None:
    """Keep an exchange for backward. Its tensors are saved as such, so that recomputation drops them."""
    ctx.save_for_backward(exchange.order, exchange.places, exchange.ends)
    ctx.group, ctx.sends, ctx.receives = exchange.group, exchange.sends, exchange.receives


def kept_exchange(ctx: Any) -> Exchange:
    order, places, ends = ctx.saved_tensors
    return Exchange(ctx.group, ctx.sends, ctx.receives, order, places, ends)


def to_experts(x_SD: Tensor, exchange: Exchange) -> Tensor:
    return move(x_SD, exchange.sends, exchange.receives, exchange.group).index_select(0, exchange.order)


def from_experts(y_RD: Tensor, exchange: Exchange) -> Tensor:
    return move(y_RD.index_select(0, exchange.places), exchange.receives, exchange.sends, exchange.group)


def move(rows: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all of runs of rows, as bytes: Gloo does not take every dtype."""
    received = rows.new_empty(sum(receives), rows.shape[1])
    raw, raw_received = rows.contiguous().view(torch.uint8), received.view(torch.uint8)
    dist.all_to_all_single(raw_received, raw, receives, sends, group=group)
    return received
