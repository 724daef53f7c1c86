"""The gradient's global norm from sharded buckets, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.trainer.bucket import LINE, BucketPlan
from stoker.trainer.communicator import Communicator


def global_norm(shards: Sequence[Tensor], plans: Sequence[BucketPlan], communicator: Communicator) -> Tensor:
    """Euclidean norm over all buckets, as an fp64 scalar, the same bits on every rank.

    Each line of LINE elements gives one partial sum; partials are added in the order of the layout, so the norm does not depend on the number
    of shards (every rank adds the same list).
    """
    partials = torch.cat([_line_squares(shard) for shard in shards])
    by_rank = communicator.exchange(partials)
    in_order, start = [], 0
    for plan in plans:
        lines = plan.shard_numel // LINE
        in_order.append(by_rank[:, start : start + lines].reshape(-1)[: plan.used // LINE])
        start += lines
    return torch.cat(in_order).to(torch.float64).sum().sqrt()


def clip_factor(norm: float, largest: float) -> float:
    """Factor for the gradient; 1.0 when `largest` is 0 (off) or the norm is within it."""
    return largest / norm if 0.0 < largest < norm else 1.0


def _line_squares(shard: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(shard.view(-1, LINE), dim=1)
    return norms.square_()
