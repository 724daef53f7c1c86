"""LAMB over sharded buckets (You et al. 2019, "Large Batch Optimization for Deep Learning: Training BERT in 76
minutes", algorithm 2): Adam's direction, scaled per tensor by the ratio of the norms of weights and direction.

Changes masters and moments in place. A tensor may lie in several ranks' shards: one small exchange adds its squares.
Called by `zero` once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.model.parameter import Part
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE, Bucket, Reduction
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.optimizer import HeldState, UpdateNumbers

SumOverHolders = Callable[[Reduction, Tensor], Tensor]
"""Adds partial sums of one kind of buckets over all ranks that hold a part of their tensors."""
TensorSizes = Mapping[int, Sequence[int]]
"""Id of a fused parameter -> numbers of elements of its tensors, in order."""


@dataclass(frozen=True)
class Span:
    """Elements [start, end) of a bucket: one tensor of the model."""

    start: int
    end: int

    def cells(self, by_line: bool) -> int:
        """Number of partial sums of the tensor."""
        return (self.end - 1) // LINE - self.start // LINE + 1 if by_line else 1


class Lamb:
    """The update rule. The weight decay is a part of the direction, as in the paper; the ratio is 1 for zero norms."""

    def __init__(
        self,
        config: OptimizationConfig,
        ops: Ops,
        sum_over_holders: SumOverHolders,
        *,
        by_line: bool,
        sizes: TensorSizes | None = None,
    ) -> None:
        """`by_line`: the norms' bits do not depend on the number of shards.

        `sizes`: the tensors inside of fused parameters; others are one tensor.
        """
        self._config, self._ops, self._sum_over_holders = config, ops, sum_over_holders
        self._by_line = by_line
        self._sizes = sizes or {}

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        held = list(states)
        cells = []
        for state in held:
            lines = self.update_moments(state, numbers)
            cells.append(self.cells(state, [[found] for found in lines]))
        rates = self.rates(held, cells, numbers)
        for state, own in zip(held, rates, strict=True):
            self.apply(state, own, numbers)
            updated(state.bucket)

    def update_moments(self, state: HeldState, numbers: UpdateNumbers) -> list[Tensor]:
        """Update the moments of any whole lines of a bucket's state.

        Returns the squares of each line of weights and direction, fp32 [lines, 2], of each tensor's part there.
        """
        self._update_moments(state, numbers)
        direction = self._direction(state, numbers.step)
        return [self._span_lines(state, span, direction) for span in tensor_spans(state.bucket, self._sizes)]

    def num_cells(self, bucket: Bucket) -> int:
        """Number of partial sums of a bucket."""
        return sum(span.cells(self._by_line) for span in tensor_spans(bucket, self._sizes))

    def cells(self, state: HeldState, lines: Sequence[Sequence[Tensor]]) -> Tensor:
        """Partial sums of squares of weights and direction, fp64 [cells, 2], zero where another rank holds them.

        `lines`: of each tensor, in pieces in their order (`update_moments`).
        """
        spans = tensor_spans(state.bucket, self._sizes)
        rows = [self._span_cells(state, span, torch.cat(list(own))) for span, own in zip(spans, lines, strict=True)]
        return torch.cat(rows) if rows else state.gradient.new_zeros(0, 2, dtype=torch.float64)

    def rates(self, states: Sequence[HeldState], cells: Sequence[Tensor], numbers: UpdateNumbers) -> list[Tensor]:
        """The rates of the tensors of each bucket, fp32 (collective)."""
        spans = [tensor_spans(state.bucket, self._sizes) for state in states]
        sums = self._sum([state.bucket.reduction for state in states], cells)
        ratios = self._ratios(sums, [span for found in spans for span in found])
        rates = ratios * (numbers.learning_rate * numbers.scale.isfinite())
        return list(torch.split(rates, [len(found) for found in spans]))

    def _sum(self, kinds: Sequence[Reduction], cells: Sequence[Tensor]) -> Tensor:
        """The partial sums of all buckets, in their order, each added over the ranks."""
        sums: dict[int, Tensor] = {}
        for kind in dict.fromkeys(kinds):
            own = [index for index, other in enumerate(kinds) if other == kind]
            total = self._sum_over_holders(kind, torch.cat([cells[index] for index in own]))
            sums.update(zip(own, torch.split(total, [len(cells[index]) for index in own]), strict=True))
        return torch.cat([sums[index] for index in range(len(cells))])

    def _update_moments(self, state: HeldState, numbers: UpdateNumbers) -> None:
        """Without a wait for the device: a scale that is not finite makes every weight of the new gradient zero."""
        is_finite = numbers.scale.isfinite()
        grad = torch.where(is_finite, state.gradient * numbers.scale, 0.0)
        beta1, beta2 = self._config.beta1, self._config.beta2
        state.exp_avg.lerp_(grad, (1.0 - beta1) * is_finite)
        state.exp_avg_sq.mul_(torch.where(is_finite, beta2, 1.0))
        state.exp_avg_sq.add_(grad.square_().mul_((1.0 - beta2) * is_finite))

    def _direction(self, state: HeldState, step: int) -> Tensor:
        """Adam's step for a rate of 1, and the decay; before the first update that counts it is the decay alone."""
        first, second = 1.0 - self._config.beta1**step, 1.0 - self._config.beta2**step
        root = (state.exp_avg_sq / second).sqrt_().add_(self._config.epsilon)
        direction = (state.exp_avg / first).div_(root)
        end = state.decay_end
        direction[:end] += state.master[:end] * self._config.weight_decay
        return direction

    def _span_lines(self, state: HeldState, span: Span, direction: Tensor) -> Tensor:
        begin, end = clip_span(span, state)
        if begin >= end:
            return direction.new_zeros(0, 2)
        both = (whole_lines(values, begin, end) for values in (state.master, direction))
        return torch.stack([self._ops.line_squares(values, LINE) for values in both], dim=1)

    def _span_cells(self, state: HeldState, span: Span, lines: Tensor) -> Tensor:
        out = torch.zeros(span.cells(self._by_line), 2, dtype=torch.float64, device=lines.device)
        if not len(lines):
            return out
        if self._by_line:
            first = (state.start + clip_span(span, state)[0]) // LINE - span.start // LINE
            out[first : first + len(lines)] = lines
        else:
            out[0] = torch.stack([column.sum(dtype=torch.float64) for column in lines.t().contiguous()])
        return out

    def _ratios(self, sums: Tensor, spans: Sequence[Span]) -> Tensor:
        """The ratio of each tensor, fp32 [tensors]."""
        by_tensor = torch.split(sums, [span.cells(self._by_line) for span in spans])
        weights, directions = torch.stack([cells.sum(0) for cells in by_tensor]).sqrt_().unbind(1)
        known = (weights > 0) & (directions > 0) & directions.isfinite()
        return torch.where(known, weights / directions, 1.0).float()

    def apply(self, state: HeldState, rates: Tensor, numbers: UpdateNumbers) -> None:
        """Subtract the direction times each tensor's rate, in two roundings wherever the state is cut."""
        step = self._direction(state, numbers.step)
        for span, rate in zip(tensor_spans(state.bucket, self._sizes), rates, strict=True):
            begin, end = clip_span(span, state)
            if begin < end:
                step[begin:end] *= rate
        state.master.sub_(step)
        if state.parameters is not None:
            state.parameters.copy_(state.master)


def sum_over_holders(cells: Tensor, kind: Reduction, mesh: Mesh, *, is_whole: bool) -> Tensor:
    """Add partial sums over the ranks among which tensors are sharded, and cut (collective).

    `is_whole`: every rank holds all of the state that its communicator shares (stage 0). A cell is zero on the ranks
    that hold no part of it, so the sum has the same bits for any number of shards.
    """
    total = cells if is_whole else mesh.reduction(kind).exchange(cells).sum(0)
    if mesh.tensor is None or kind != "dense":
        return total
    by_rank = [torch.empty_like(total) for _ in range(mesh.dims.tensor)]
    dist.all_gather(by_rank, total.contiguous(), group=mesh.tensor)  # over tensor: each rank has a part of each tensor
    return torch.stack(by_rank).sum(0)


def tensor_spans(bucket: Bucket, sizes: TensorSizes) -> list[Span]:
    """The tensors of a bucket, in the order of its layout."""
    spans = []
    for item, parameter in zip(bucket.plan.ranges, bucket.parameters, strict=True):
        start = item.offset
        for size in sizes.get(id(parameter), (item.numel,)):
            spans.append(Span(start, start + size))
            start += size
    return spans


def tensor_sizes(parts: Iterable[Part]) -> dict[int, list[int]]:
    """The tensors inside of each parameter of a model."""
    sizes: dict[int, list[int]] = {}
    for part in parts:
        sizes.setdefault(id(part.parameter), []).append(part.num_elements)
    return sizes


def clip_span(span: Span, state: HeldState) -> tuple[int, int]:
    """The part of a tensor that a rank holds, as positions in its shard; empty when it begins at its end or later."""
    return max(span.start - state.start, 0), min(span.end - state.start, state.master.numel())


def whole_lines(values: Tensor, begin: int, end: int) -> Tensor:
    """Elements [begin, end) with zeros up to the ends of their lines."""
    first, last = begin // LINE * LINE, -(-end // LINE) * LINE
    if (first, last) == (begin, end):
        return values[begin:end]
    lines = values.new_zeros(last - first)
    lines[begin - first : end - first] = values[begin:end]
    return lines
