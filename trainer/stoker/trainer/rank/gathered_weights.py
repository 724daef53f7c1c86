"""ZeRO stage 3: the weights of the buckets in use, gathered into two buffers that take turns.

Each rank keeps its shard of every bucket's weights. A bucket is gathered before its use; while it computes, its
neighbour in the direction of the pass is gathered into the other buffer. Backward gathers again: what autograd keeps of
a weight is its place in the bucket. No memory is allocated after the first step.

Owned by `zero`; the forward pass calls it at the boundaries of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import DONE, Communicator, Pending
from stoker.trainer.rank.saved_tensors import Restore

BUFFERS = 2


@dataclass(frozen=True)
class ShardedBucket:
    """A bucket's weights on this rank, in the compute dtype."""

    bucket: Bucket
    shard: Tensor


@dataclass(eq=False)
class Buffer:
    """Memory for one bucket's weights."""

    flat: Tensor
    holds: ShardedBucket | None = None
    gathering: Pending = field(default=DONE)

    @property
    def address(self) -> int:
        return self.flat.untyped_storage().data_ptr()


class GatheredWeights:
    """Gathers buckets in the order of their use. Every rank makes the same calls (collective)."""

    def __init__(self, communicator: Communicator, buckets: Sequence[ShardedBucket]) -> None:
        """`buckets` in the order of the forward pass."""
        self._communicator = communicator
        self._buckets = list(buckets)
        self._index = {item.bucket.name: index for index, item in enumerate(self._buckets)}
        self._buffers: list[Buffer] = []
        self._current: Buffer | None = None
        self._forward = True

    def use(self, name: str) -> None:
        """Make the parameters of a bucket ready for use, and start to gather its neighbour.

        They stay until two further buckets are used.
        """
        index = self._index[name]
        self._current = self._hold(self._buckets[index])
        neighbour = index + 1 if self._forward else index - 1
        if 0 <= neighbour < len(self._buckets) and self._worth(neighbour):
            self._start(self._buckets[neighbour])

    def _worth(self, neighbour: int) -> bool:
        """The first bucket is the embedding, whose backward does not read the weight."""
        return self._forward or neighbour > 0

    def before_backward(self, name: str) -> None:
        """Like `use`, when backward reaches a bucket: from here on the order is reversed."""
        self._forward = False
        self.use(name)

    def end_backward(self) -> None:
        """The next bucket that is used is the first one of a forward pass."""
        self._forward = True

    def discard(self) -> None:
        """The shards have changed: what is gathered is out of date."""
        self._forward, self._current = True, None
        for buffer in self._buffers:
            self._clear(buffer)

    def prepare_forward(self) -> None:
        """Start to gather the first bucket."""
        self._start(self._buckets[0])

    def restore_of(self, tensor: Tensor) -> Restore | None:
        """For a view of a gathered weight: its place, from which backward gets the same view of the bucket."""
        address = tensor.untyped_storage().data_ptr()
        for buffer in self._buffers:
            if buffer.address == address and buffer.holds is not None:
                return partial(self._view, buffer.holds, tensor.shape, tensor.stride(), tensor.storage_offset())
        return None

    def _view(self, item: ShardedBucket, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        return self._hold(item).flat.as_strided(size, stride, offset)

    def _hold(self, item: ShardedBucket) -> Buffer:
        buffer = self._start(item)
        if buffer.gathering is not DONE:
            buffer.gathering.wait()
            buffer.gathering = DONE
            item.bucket.adopt(buffer.flat[: item.bucket.plan.numel])
        return buffer

    def _start(self, item: ShardedBucket) -> Buffer:
        """The buffer that holds the bucket, or will when its gather has ended."""
        for buffer in self._buffers:
            if buffer.holds is item:
                return buffer
        buffer = self._vacant()
        self._clear(buffer)
        flat = buffer.flat[: item.bucket.plan.numel]
        self._communicator.shard(flat).copy_(item.shard)
        buffer.holds = item
        gathering = self._communicator.all_gather(flat)
        buffer.gathering = Pending(gathering.finish)
        return buffer

    def _vacant(self) -> Buffer:
        """The buffer that is not in use: nothing reads its contents after the work that is queued now."""
        if not self._buffers:
            self._buffers = [self._allocate() for _ in range(BUFFERS)]
        others = [buffer for buffer in self._buffers if buffer is not self._current]
        return next((buffer for buffer in others if buffer.holds is None), others[0])

    def _allocate(self) -> Buffer:
        like = self._buckets[0].shard
        return Buffer(like.new_zeros(max(item.bucket.plan.numel for item in self._buckets)))

    def _clear(self, buffer: Buffer) -> None:
        """Wait for a gather that was never used, and take the memory away from the parameters."""
        if buffer.holds is None:
            return
        buffer.gathering.wait()
        buffer.gathering = DONE
        buffer.holds.bucket.release()
        buffer.holds = None
