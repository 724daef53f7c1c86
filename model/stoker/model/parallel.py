"""Layers that may be cut over a tensor-parallel group. `group=None` is one rank: same code, no communication.

Each layer holds its parameters and declares the dim that it shards; the products themselves are `ops.linear`. With
`sequence_parallel`, what lies between the products (norms, residual stream) is cut by tokens. T tokens, D input size,
E output size, V vocab; t tokens of this rank, all of them without sequence parallelism.

A gradient of a parameter that is cut is complete. That of a parameter that every rank holds whole is this rank's part:
the sum over the group is the gradient.

Made by `block` and `decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from stoker.model.group_sums import GroupSums
from stoker.model.kernels.kernel_set import CrossEntropy
from stoker.model.kernels.ops import Ops
from stoker.model.lora import AdaptedTensor, LoraAdapter, LoraSettings
from stoker.model.overlapped_products import gather_linear, linear_scatter
from stoker.model.parameter import Part, Section
from stoker.model.tensor_group import (
    copy_to_group,
    counted_once,
    gather_from_group,
    gather_tokens,
    gather_tokens_of_whole,
    group_rank,
    group_size,
    reduce_from_group,
    row_share,
    scatter_tokens,
    shard_size,
)


class ColumnParallelLinear(nn.Module):
    """y_TE = x_TD @ W_ED^T with W's rows (dim 0) cut over the group, one slice of every section on each rank.

    The input is whole on every rank (with sequence parallelism cut by tokens, and gathered here), the output is this
    rank's columns of all tokens.
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
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.ops, self.group, self.sections, self.in_features = ops, group, tuple(sections), in_features
        self.local_rows = [shard_size(section.rows * section.copies, group, section.hf_name) for section in sections]
        self.weight = nn.Parameter(torch.empty(sum(self.local_rows), in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(sum(self.local_rows), dtype=dtype, device=device)) if bias else None
        self.adapters = nn.ModuleDict()
        """By the index of the section."""

    def forward(self, x_tD: Tensor) -> Tensor:
        if self.group is not None and self.sequence_parallel and not self.adapters and self.ops.is_plain(self.weight):
            y_TE = gather_linear(x_tD, self.weight, self.group, self.ops)
            return y_TE if self.bias is None else y_TE + self.bias
        enter = gather_tokens if self.sequence_parallel else copy_to_group
        x_TD = enter(x_tD, self.group)
        if self.group is not None and self.sequence_parallel:
            self.ops.note_gathered(x_TD, x_tD, self.group)
        y_TE = self.ops.linear(x_TD, self.weight, self.bias)
        return self._adapted(x_TD, y_TE) if self.adapters else y_TE

    def _adapted(self, x_TD: Tensor, y_TE: Tensor) -> Tensor:
        """Add the adapters' products to the columns of their sections."""
        sections = list(torch.split(y_TE, self.local_rows, 1))
        for index, adapter in self.adapters.items():
            sections[int(index)] = sections[int(index)] + adapter(x_TD)
        return torch.cat(sections, 1)

    def add_adapters(self, settings: LoraSettings) -> None:
        """Add an adapter to each section that the settings name."""
        for index, (section, rows) in enumerate(zip(self.sections, self.local_rows, strict=True)):
            if settings.adapts(section.hf_name):
                tensor = AdaptedTensor(
                    hf_name=section.hf_name,
                    shape=(section.rows, self.in_features),
                    start=(rows * group_rank(self.group), 0),
                    size=(rows, self.in_features),
                    shard_dim=self.shard_dim,
                )
                self.adapters[str(index)] = LoraAdapter(settings, tensor, self.ops, self.weight)

    def of_norm(self, norm: Norm, x_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (self(norm(x + update)), x + update)."""
        if self.group is None and not self.adapters:
            return self.ops.norm_linear(x_tD, update_tD, norm.weight, norm.eps, self.weight, self.bias)
        normed_tD, x_tD = norm.of_sum(x_tD, update_tD)
        return self(normed_tD), x_tD

    def swiglu_of_norm(self, norm: Norm, x_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (swiglu(self(norm(x + update))), x + update); the sections are gate and up."""
        if self.group is None and not self.adapters:
            return self.ops.norm_linear_swiglu(x_tD, update_tD, norm.weight, norm.eps, self.weight)
        normed_tD, x_tD = norm.of_sum(x_tD, update_tD)
        if norm.sums is not None and not self.adapters:
            return self.ops.linear_swiglu(normed_tD, self.weight), x_tD
        return self.ops.swiglu(self(normed_tD)), x_tD

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
            begin = rows * (group_rank(self.group) // section.copies)
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

    The input is this rank's columns of all tokens, the output is whole on every rank; with sequence parallelism it is
    cut by tokens.
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
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.ops, self.group, self.section, self.in_features = ops, group, section, in_features
        self.local_columns = shard_size(in_features, group, section.hf_name)
        self.weight = nn.Parameter(torch.empty(section.rows, self.local_columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(section.rows, dtype=dtype, device=device)) if bias else None
        self.adapter: LoraAdapter | None = None
        self.sums: GroupSums | None = None
        """Set where the norm that follows adds the ranks' parts (`Decoder.defer_sums`)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.group is None:
            y_TE = self.ops.linear(x_TD, self.weight, self.bias)
            return y_TE if self.adapter is None else y_TE + self.adapter(x_TD)
        if self.sequence_parallel and self.adapter is None and self.ops.is_plain(self.weight):
            y_tE = linear_scatter(x_TD, self.weight, self.group)
        else:
            partial_TE = self.ops.linear(x_TD, self.weight)
            if self.adapter is not None:
                partial_TE = partial_TE + self.adapter(x_TD)  # before the sum: each rank has its columns of A
            if self.sums is not None:
                return self.sums.begin(partial_TE if self.bias is None or self.sums.rank else partial_TE + self.bias)
            leave = scatter_tokens if self.sequence_parallel else reduce_from_group
            y_tE = leave(partial_TE, self.group)
        return y_tE if self.bias is None else y_tE + self._shared(self.bias)  # once, after the sum

    def add_adapters(self, settings: LoraSettings) -> None:
        """Add an adapter if the settings name this projection."""
        if not settings.adapts(self.section.hf_name):
            return
        tensor = AdaptedTensor(
            hf_name=self.section.hf_name,
            shape=(self.section.rows, self.in_features),
            start=(0, self.local_columns * group_rank(self.group)),
            size=(self.section.rows, self.local_columns),
            shard_dim=self.shard_dim,
        )
        self.adapter = LoraAdapter(settings, tensor, self.ops, self.weight)

    def _shared(self, bias: Tensor) -> Tensor:
        return bias if self.sequence_parallel else counted_once(bias, self.group)

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
    """The table W_VD with its rows (dim 0) cut over the group; embedding and output layer are two uses of it.

    A vocabulary that the ranks do not divide leaves the last one fewer rows.
    """

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
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.ops, self.group, self.section, self.hidden_size = ops, group, section, hidden_size
        share = row_share(section.rows, group_rank(group), group_size(group), section.hf_name)
        self.first_token, self.local_rows, self.most_rows = share
        self.weight = nn.Parameter(torch.empty(self.local_rows, hidden_size, dtype=dtype, device=device))
        self.packed: Tensor | None = None
        self.sums: GroupSums | None = None
        """Set where nothing needs a gradient (`Decoder.defer_sums`)."""

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return x_TD, whole on every rank; with sequence parallelism x_tD.

        A token outside the vocabulary raises IndexError on the CPU (one rank).
        """
        if self.group is None:
            return self.ops.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.first_token
        here_T = (local_T >= 0) & (local_T < self.local_rows)
        x_TD = self.ops.embedding(local_T.clamp(0, self.local_rows - 1), self.weight)
        if self.sums is not None:
            return self.sums.sum(x_TD * here_T.unsqueeze(1))
        leave = scatter_tokens if self.sequence_parallel else reduce_from_group
        return leave(x_TD * here_T.unsqueeze(1), self.group)

    def logits(self, hidden_tD: Tensor) -> Tensor:
        """Return logits_TV, whole on every rank, in float32 where `Ops.logits` gives it."""
        if self.sums is not None:
            return self._cut(self.sums.gather_columns(self._filled(self.part_logits(hidden_tD))))
        enter = gather_tokens if self.sequence_parallel else copy_to_group
        logits_TV = self._filled(self.part_logits(enter(hidden_tD, self.group)))
        return self._cut(gather_from_group(logits_TV, self.group))

    def part_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_Tv of this rank's part of the vocabulary; nothing is exchanged."""
        return self.ops.logits(hidden_TD, self.weight if self.packed is None else self.packed)

    def dealt_logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits_bV of this rank's share of the rows, for serving (`GroupSums.deal_rows`)."""
        assert self.sums is not None, "set by `Decoder.defer_sums`"
        return self._cut(self.sums.deal_rows(self._filled(self.part_logits(hidden_BD))))

    def _filled(self, logits_TV: Tensor) -> Tensor:
        """Return this rank's logits with as many columns as every other rank has: what is exchanged is alike."""
        missing = self.most_rows - self.local_rows
        return logits_TV if missing == 0 else functional.pad(logits_TV, (0, missing))

    def _cut(self, logits_TV: Tensor) -> Tensor:
        """Return the ranks' logits side by side without what fills the last part."""
        rows = self.section.rows
        return logits_TV if logits_TV.shape[-1] == rows else logits_TV[..., :rows].contiguous()

    def cross_entropy(self, hidden_tD: Tensor, targets_T: Tensor, weights_T: Tensor) -> CrossEntropy:
        """Compute output layer and loss together, the same on every rank. No rank has the logits of the whole table."""
        hidden_TD = gather_tokens_of_whole(hidden_tD, self.group) if self.sequence_parallel else hidden_tD
        return self.ops.cross_entropy(
            *(hidden_TD, self.weight, targets_T, weights_T),
            first_token=self.first_token,
            group=self.group,
            most_rows=self.most_rows,
        )

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
        self,
        hf_name: str,
        size: int,
        eps: float,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.hf_name, self.eps = ops, hf_name, eps
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.sums: GroupSums | None = None
        """Set where an update is this rank's part of a sum (`Decoder.defer_sums`)."""

    def forward(self, x_tD: Tensor) -> Tensor:
        return self.ops.rms_norm(x_tD, self._shared_weight(), self.eps)

    def of_sum(self, x_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + update), x + update)."""
        if self.sums is not None and update_tD is not None:
            return self.sums.sum_norm(update_tD, x_tD, self.weight, self.eps)
        return self.ops.norm_of_sum(x_tD, update_tD, self._shared_weight(), self.eps)

    def _shared_weight(self) -> Tensor:
        """The weight, of which this rank's gradient is a part: with sequence parallelism it sees its own tokens."""
        return self.weight if self.sequence_parallel else counted_once(self.weight, self.group)

    def parts(self, prefix: str) -> Iterator[Part]:
        rows = self.weight.shape[0]
        yield Part(f"{self.hf_name}.weight", f"{prefix}.weight", self.weight, 0, rows, (rows,), (0,), None)
