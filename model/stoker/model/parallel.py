"""Layers that may be cut over a tensor-parallel group. `group=None` is one rank: same code, no communication.

Each layer holds its parameters and declares the dim that it shards; the products themselves are `ops.linear`. T tokens,
D input size, E output size, V vocab.

Made by `block` and `decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.kernels.ops import Ops
from stoker.model.parameter import Part, Section


class ColumnParallelLinear(nn.Module):
    """y_TE = x_TD @ W_ED^T with W's rows (dim 0) cut over the group, one slice of every section on each rank.

    The input is whole on every rank, the output is this rank's columns.
    """

    shard_dim = 0

    def __init__(
        self,
        sections: Sequence[Section],
        in_features: int,
        ops: Ops,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.ops, self.group, self.sections, self.in_features = ops, group, tuple(sections), in_features
        self.local_rows = [shard_size(section.rows, group, section.hf_name) for section in sections]
        self.weight = nn.Parameter(torch.empty(sum(self.local_rows), in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(sum(self.local_rows), dtype=dtype, device=device)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(copy_to_group(x_TD, self.group), self.weight, self.bias)

    def of_norm(self, norm: Norm, x_TD: Tensor, update_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (self(norm(x + update)), x + update)."""
        if self.group is None:
            return self.ops.norm_linear(x_TD, update_TD, norm.weight, norm.eps, self.weight, self.bias)
        normed_TD, x_TD = norm.of_sum(x_TD, update_TD)
        return self(normed_TD), x_TD

    def swiglu_of_norm(self, norm: Norm, x_TD: Tensor, update_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (swiglu(self(norm(x + update))), x + update); the sections are gate and up."""
        if self.group is None:
            return self.ops.norm_linear_swiglu(x_TD, update_TD, norm.weight, norm.eps, self.weight)
        normed_TD, x_TD = norm.of_sum(x_TD, update_TD)
        return self.ops.swiglu(self(normed_TD)), x_TD

    def pack(self) -> None:
        self.weight = nn.Parameter(self.ops.pack(self.weight), requires_grad=False)

    def parts(self, prefix: str) -> Iterator[Part]:
        yield from self.parts_of(self.weight, f"{prefix}.weight", "weight", (self.in_features,))
        if self.bias is not None:
            yield from self.parts_of(self.bias, f"{prefix}.bias", "bias", ())

    def parts_of(
        self, parameter: nn.Parameter, parameter_name: str, suffix: str, tail: tuple[int, ...]
    ) -> Iterator[Part]:
        row = 0
        for section, rows in zip(self.sections, self.local_rows, strict=True):
            begin = rows * group_rank(self.group)
            yield Part(
                f"{section.hf_name}.{suffix}",
                parameter_name,
                parameter,
                row,
                row + rows,
                (section.rows, *tail),
                (begin, *(0 for _ in tail)),
                self.shard_dim,
            )
            row += rows


class RowParallelLinear(nn.Module):
    """y_TE = sum over ranks of x_TD @ W_ED^T with W's columns (dim 1) cut over the group.

    The input is this rank's columns, the output is whole on every rank.
    """

    shard_dim = 1

    def __init__(
        self,
        section: Section,
        in_features: int,
        ops: Ops,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.ops, self.group, self.section, self.in_features = ops, group, section, in_features
        self.local_columns = shard_size(in_features, group, section.hf_name)
        self.weight = nn.Parameter(torch.empty(section.rows, self.local_columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(section.rows, dtype=dtype, device=device)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.group is None:
            return self.ops.linear(x_TD, self.weight, self.bias)
        y_TE = reduce_from_group(self.ops.linear(x_TD, self.weight), self.group)
        return y_TE if self.bias is None else y_TE + self.bias  # once, after the sum

    def pack(self) -> None:
        self.weight = nn.Parameter(self.ops.pack(self.weight), requires_grad=False)

    def parts(self, prefix: str) -> Iterator[Part]:
        rows = self.section.rows
        start = (0, self.local_columns * group_rank(self.group))
        yield Part(
            f"{self.section.hf_name}.weight",
            f"{prefix}.weight",
            self.weight,
            0,
            rows,
            (rows, self.in_features),
            start,
            self.shard_dim,
        )
        if self.bias is not None:
            yield Part(f"{self.section.hf_name}.bias", f"{prefix}.bias", self.bias, 0, rows, (rows,), (0,), None)


class VocabParallel(nn.Module):
    """The table W_VD with its rows (dim 0) cut over the group; embedding and output layer are two uses of it."""

    shard_dim = 0

    def __init__(
        self,
        section: Section,
        hidden_size: int,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.ops, self.group, self.section, self.hidden_size = ops, group, section, hidden_size
        self.local_rows = shard_size(section.rows, group, section.hf_name)
        self.first_token = self.local_rows * group_rank(group)
        self.weight = nn.Parameter(torch.empty(self.local_rows, hidden_size, dtype=dtype, device=device))
        self.packed: Tensor | None = None

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return x_TD, whole on every rank. A token outside the vocabulary raises IndexError on the CPU (one rank)."""
        if self.group is None:
            return self.ops.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.first_token
        here_T = (local_T >= 0) & (local_T < self.local_rows)
        x_TD = self.ops.embedding(local_T.clamp(0, self.local_rows - 1), self.weight)
        return reduce_from_group(x_TD * here_T.unsqueeze(1), self.group)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_TV, whole on every rank, in float32 where `Ops.logits` gives it."""
        weight = self.weight if self.packed is None else self.packed
        return gather_from_group(self.ops.logits(copy_to_group(hidden_TD, self.group), weight), self.group)

    def pack(self) -> None:
        """Pack the table beside the plain one, which embedding reads by rows."""
        self.packed = self.ops.pack(self.weight)

    def parts(self, prefix: str) -> Iterator[Part]:
        shape = (self.section.rows, self.hidden_size)
        yield Part(
            f"{self.section.hf_name}.weight",
            f"{prefix}.weight",
            self.weight,
            0,
            self.local_rows,
            shape,
            (self.first_token, 0),
            self.shard_dim,
        )


class Norm(nn.Module):
    """RMS norm's weight, replicated on every rank."""

    shard_dim = None

    def __init__(
        self, hf_name: str, size: int, eps: float, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ops, self.hf_name, self.eps = ops, hf_name, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TD, self.weight, self.eps)

    def of_sum(self, x_TD: Tensor, update_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + update), x + update)."""
        return self.ops.norm_of_sum(x_TD, update_TD, self.weight, self.eps)

    def parts(self, prefix: str) -> Iterator[Part]:
        rows = self.weight.shape[0]
        yield Part(f"{self.hf_name}.weight", f"{prefix}.weight", self.weight, 0, rows, (rows,), (0,), None)


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def shard_size(total: int, group: ProcessGroup | None, name: str) -> int:
    """Return the rows of one rank. Raises ValueError with the arithmetic where the cut is not even."""
    if total % group_size(group):
        raise ValueError(
            f"{name}: {total} cannot be cut over tensor parallel size {group_size(group)}: {total} % "
            f"{group_size(group)} = {total % group_size(group)}"
        )
    return total // group_size(group)


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward: identity.

    Backward: all-reduce over tp, because each rank used the value for its own part of the result.
    """
    return x if group is None else CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward: all-reduce over tp. Backward: identity."""
    return x if group is None else ReduceFromGroup.apply(x, group)


def gather_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Forward: all-gather the last dim over tp. Backward: this rank's slice."""
    return x if group is None else GatherFromGroup.apply(x, group)


class CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

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
