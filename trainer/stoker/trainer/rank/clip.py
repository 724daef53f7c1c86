"""The global norm of the gradient over sharded buckets, and the factor that clips it.

Computed on the device without blocking the host.

Called by the training step, after the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.trainer.rank.bucket import LINE, BucketPlan
from stoker.trainer.rank.communicator import Communicator
from stoker.trainer.rank.ordered_sum import sum_and_square


class GradientNorm:
    """Squares of each rank's shard of each bucket, then the sum over all of them, the same bits on every rank.

    By bucket: one fp64 sum per shard. By line: each line of LINE elements gives one partial sum, and the partials are
    added in the order of the layout, so that the norm does not depend on the number of shards (every rank adds the same
    list).
    """

    def __init__(self, ops: Ops, by_line: bool) -> None:
        self._ops = ops
        self._by_line = by_line

    def new_squares(self, shard_numel: int, device: torch.device) -> Tensor:
        """A buffer for the squares of one shard."""
        if self._by_line:
            return torch.zeros(shard_numel // LINE, dtype=torch.float32, device=device)
        return torch.zeros(1, dtype=torch.float64, device=device)

    def total(self, squares: Tensor, rows: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        """Sum the ranks' rows into `out` like `sum_in_order`, and write the squares of the sum to `squares`."""
        lines = sum_and_square(rows, out, self._ops, LINE, add=add)
        squares.copy_(lines if self._by_line else lines.sum(dtype=torch.float64))

    def square_sum(self, squares: Sequence[Tensor], plans: Sequence[BucketPlan], communicator: Communicator) -> Tensor:
        """Sum over all shards of the buckets that share a communicator, as an fp64 scalar (collective)."""
        by_rank = communicator.exchange(torch.cat(list(squares)))
        if not self._by_line:
            return by_rank.sum()
        in_order, start = [], 0
        for plan in plans:
            lines = plan.shard_numel // LINE
            in_order.append(by_rank[:, start : start + lines].reshape(-1)[: plan.used // LINE])
            start += lines
        return torch.cat(in_order).to(torch.float64).sum()


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """Factor for the gradient, fp64 like `norm`; 1.0 when `largest` is 0 (off) or the norm is within it."""
    if largest <= 0.0:
        return torch.ones_like(norm)
    return torch.where(norm > largest, largest / norm, 1.0)
