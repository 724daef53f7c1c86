"""Frozen weights of one bucket: no gradient, no fp32 copy and no optimizer state, only values in the compute dtype.

Below ZeRO stage 3 every rank holds all of them, at stage 3 a shard that is gathered for its use. Owned by `zero`;
after the start nothing changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import Communicator, Pending
from stoker.trainer.rank.gathered_weights import ShardedBucket

Fill = Callable[[Sequence[nn.Parameter]], None]
"""Writes the initial values of some parameters."""

WEIGHTS = "model"
"""Kind of state: weights of the model as they are served."""


class FrozenState:
    """One bucket's weights on this rank."""

    kinds = (WEIGHTS,)

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        dtype: torch.dtype,
        fill: Fill | None,
        *,
        shards_weights: bool,
    ) -> None:
        """`shards_weights`: keep this rank's shard alone (stage 3)."""
        self.bucket, self.communicator, self.shards_weights = bucket, communicator, shards_weights
        values = initial_values(bucket, fill)
        if shards_weights:
            bucket.release(dtype)
            self.weights = communicator.shard(values).to(dtype, copy=True)
        else:
            bucket.adopt(values.to(dtype))
            self.weights = bucket.flat

    def sharded(self) -> ShardedBucket:
        """Stage 3: this rank's shard."""
        return ShardedBucket(self.bucket, self.weights, self.communicator)

    def shards(self) -> dict[str, Tensor]:
        """This rank's shard by state kind, as a view."""
        return {WEIGHTS: self.weights if self.shards_weights else self.communicator.shard(self.weights)}

    def spread_shards(self) -> None:
        """Send what was written to this rank's shard to the other ranks (collective)."""
        self.bucket.renew()
        if not self.shards_weights:
            self.communicator.all_gather(self.weights).wait()

    def hold(self, copying: Pending) -> None:
        """Nothing changes the weights: a copy of them keeps nothing waiting."""


def initial_values(bucket: Bucket, fill: Fill | None) -> Tensor:
    """Return the parameters' values in fp32, those that `fill` writes where they have none."""
    if not bucket.is_empty:
        return bucket.master_copy()
    assert fill is not None, "parameters on the meta device need starting values"
    values = bucket.materialise()
    fill(bucket.parameters)
    return values
