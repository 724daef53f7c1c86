"""Differentiable collectives of a tensor-parallel group. `group=None` is one rank: each is the identity.

A value is *whole* (the same on every rank), *cut* (each rank has its tokens) or *partial* (the ranks' values add up to
it). Forward and backward of one function are each other's mirror. T tokens, t tokens of one rank.

With sequence parallelism tokens are cut evenly: T must be a multiple of the group's size (Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022).

Called by the layers of `parallel`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def shard_size(total: int, group: ProcessGroup | None, name: str) -> int:
    """Return the part of one rank. Raises ValueError with the arithmetic where the cut is not even."""
    if total % group_size(group):
        raise ValueError(
            f"{name}: {total} cannot be cut over tensor parallel size {group_size(group)}: {total} % "
            f"{group_size(group)} = {total % group_size(group)}"
        )
    return total // group_size(group)


class RowShare(NamedTuple):
    """Rows of a table on one rank."""

    start: int
    rows: int
    most: int
    """Of all ranks."""


ROW_MULTIPLE = 64
"""Of the rows of a rank, where they are not cut evenly: products need no more."""


def row_share(total: int, rank: int, ranks: int, name: str) -> RowShare:
    """Return the rows of one rank: equal parts, or where there are none, fewer on the last rank.

    Raises ValueError where the last rank would have none.
    """
    most = -(-total // ranks)
    if total % ranks and (rounded := -(-most // ROW_MULTIPLE) * ROW_MULTIPLE) * (ranks - 1) < total:
        most = rounded
    if most * (ranks - 1) >= total:
        raise ValueError(f"{name}: {total} rows cannot be cut over tensor parallel size {ranks}: the last has none")
    return RowShare(rank * most, min(most, total - rank * most), most)


class HeadShard(NamedTuple):
    """Heads of keys and values of one rank."""

    heads: int
    copies: int
    """Neighbouring ranks that hold the same head, because there are more ranks than heads."""


def kv_head_shard(num_kv_heads: int, size: int) -> HeadShard | None:
    """Return the part of one of `size` ranks, each of which may have a copy of a head; None where it is not even."""
    if num_kv_heads % size == 0:
        return HeadShard(num_kv_heads // size, 1)
    return HeadShard(1, size // num_kv_heads) if size % num_kv_heads == 0 else None


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Whole to whole; the gradient is partial, because each rank uses the value for its own part of the result."""
    return x if group is None else CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Partial to whole; the gradient is whole."""
    return x if group is None else ReduceFromGroup.apply(x, group)


def gather_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join the ranks' last dims; the gradient is whole, and each rank takes its slice."""
    return x if group is None else GatherFromGroup.apply(x, group)


def gather_tokens(x_tD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Cut to whole, x_TD; the gradient is partial, so each rank gets the sum for its tokens."""
    return x_tD if group is None else GatherTokens.apply(x_tD, group)


def gather_tokens_of_whole(x_tD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Cut to whole, x_TD, for a use whose gradient is whole on every rank: each takes that of its tokens."""
    return x_tD if group is None else GatherTokensOfWhole.apply(x_tD, group)


def scatter_tokens(x_TD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Partial to cut: each rank gets the sum for its tokens, x_tD."""
    return x_TD if group is None else ScatterTokens.apply(x_TD, group)


def take_tokens(x_TD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Whole to cut: each rank takes its tokens, x_tD; their gradients are joined to a whole one."""
    return x_TD if group is None else TakeTokens.apply(x_TD, group)


def counted_once(weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """Whole to whole; the gradient is whole, and only the first rank keeps it, so that the group's sum counts it
    once.
    """
    if group is None or not torch.is_grad_enabled() or group_rank(group) == 0:
        return weight
    counted: Tensor = CountedElsewhere.apply(weight)
    return counted


class CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.columns = dist.get_rank(group), x.shape[-1]
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.rank * ctx.columns, ctx.columns), None


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x_tD, group)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return reduce_scattered(grad_TD, ctx.group), None


class GatherTokensOfWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.tokens = dist.get_rank(group), x_tD.shape[0]
        return gathered(x_tD, group)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD.narrow(0, ctx.rank * ctx.tokens, ctx.tokens), None


class TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, tokens = group, shard_size(x_TD.shape[0], group, "tokens")
        return x_TD.narrow(0, dist.get_rank(group) * tokens, tokens)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_tD, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scattered(x_TD, group)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_tD, ctx.group), None


class CountedElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, as a copy."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gathered(x_tD: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' tokens one after another."""
    whole_TD = x_tD.new_empty(x_tD.shape[0] * dist.get_world_size(group), *x_tD.shape[1:])
    dist.all_gather_into_tensor(whole_TD, x_tD.contiguous(), group=group)
    return whole_TD


def reduce_scattered(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks for this rank's tokens. Raises ValueError where the tokens cannot be cut evenly."""
    own_tD = x_TD.new_empty(shard_size(x_TD.shape[0], group, "tokens"), *x_TD.shape[1:])
    dist.reduce_scatter_tensor(own_tD, x_TD.contiguous(), group=group)
    return own_tD
