"""ZeRO stage 3: the weights of the units in use (blocks, embedding, head), gathered into two buffers that take turns.

Each rank keeps its shard of every unit's weights. A unit is gathered before its use; while it computes, its neighbour
in the direction of the pass is gathered into the other buffer. Backward gathers again: what autograd keeps of a weight
is its place in the unit. No memory is allocated after the first step. A pipeline, whose passes come in the order of its
schedule, tells that order beforehand.

Owned by `zero`; the forward pass calls it at the boundaries of units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import Communicator, Pending
from stoker.trainer.rank.saved_tensors import Restore

BUFFERS = 2


@dataclass(frozen=True, eq=False)
class ShardedBucket:
    """A bucket's weights on this rank, in the compute dtype."""

    bucket: Bucket
    shard: Tensor
    communicator: Communicator
    """The ranks that hold the other shards."""
    wait: Callable[[], None] = lambda: None
    """Waits for an update of the shard that runs beside the passes."""


@dataclass(frozen=True, eq=False)
class Unit:
    """The buckets of one part of the model, side by side in a buffer."""

    buckets: Sequence[ShardedBucket]

    @property
    def numel(self) -> int:
        return sum(item.bucket.plan.numel for item in self.buckets)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Each bucket's part of a buffer."""
        return torch.split(flat[: self.numel], [item.bucket.plan.numel for item in self.buckets])


@dataclass(eq=False)
class Buffer:
    """Memory for one unit's weights."""

    flat: Tensor
    holds: Unit | None = None
    gathering: Sequence[Pending] = ()

    @property
    def address(self) -> int:
        return self.flat.untyped_storage().data_ptr()

    def wait(self) -> None:
        for gathering in self.gathering:
            gathering.wait()
        self.gathering = ()


class GatheredWeights:
    """Gathers units in the order of their use. Every rank makes the same calls (collective)."""

    def __init__(self, units: Mapping[str, Sequence[ShardedBucket]]) -> None:
        """`units` in the order of the forward pass."""
        self._units = [Unit(buckets) for buckets in units.values()]
        self._index = {name: index for index, name in enumerate(units)}
        self._buffers: list[Buffer] = []
        self._current: Buffer | None = None
        self._is_forward = True
        self._coming: deque[int] | None = None
        """The units of the coming passes, where their order was told."""

    def follow(self, names: Iterable[str]) -> None:
        """Gather ahead in this order of uses, instead of a forward and a backward pass over all units in turn.

        A unit that is used several times in a row may be named as often.
        """
        known = (self._index[name] for name in names if name in self._index)
        self._coming = deque(index for index, _ in groupby(known))

    def use(self, name: str) -> None:
        """Make the parameters of a unit ready for use, and start to gather the next one.

        They stay until two further units are used. A unit whose parameters are all whole everywhere needs nothing.
        """
        index = self._index.get(name)
        if index is None:
            return
        self._current = self._hold(self._units[index])
        following = self._following(index)
        if following is not None:
            self._start(self._units[following])

    def _following(self, index: int) -> int | None:
        """The unit that is used after this one."""
        if self._coming is not None:
            if self._coming and self._coming[0] == index:
                self._coming.popleft()
            return self._coming[0] if self._coming else None
        neighbour = index + 1 if self._is_forward else index - 1
        # Backward has no use for the first unit: an embedding's gradient does not depend on the weight.
        return neighbour if (0 if self._is_forward else 1) <= neighbour < len(self._units) else None

    def use_too(self, name: str) -> None:
        """Make a second unit ready beside the one in use (the embedding as the output layer); no neighbour follows."""
        self._hold(self._units[self._index[name]])

    def before_backward(self, name: str) -> None:
        """Like `use`, when backward reaches a unit: from here on the order is reversed."""
        self._is_forward = False
        self.use(name)

    def end_backward(self) -> None:
        """The next unit that is used is the first one of a forward pass."""
        self._is_forward = True

    def discard(self) -> None:
        """The shards have changed: what is gathered is out of date."""
        self._is_forward, self._current, self._coming = True, None, None
        for buffer in self._buffers:
            self._clear(buffer)

    def prepare_forward(self) -> None:
        """Start to gather the first unit."""
        self._start(self._units[0])

    def wait(self) -> None:
        """Wait for the gathers in flight: a process group must not end before them."""
        for buffer in self._buffers:
            if buffer.holds is not None:
                self._hold(buffer.holds)

    def restore_of(self, tensor: Tensor) -> Restore | None:
        """For a view of a gathered weight: its place, from which backward gets the same view of the unit."""
        address = tensor.untyped_storage().data_ptr()
        for buffer in self._buffers:
            if buffer.address == address and buffer.holds is not None:
                return partial(self._view, buffer.holds, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return None

    def _view(self, unit: Unit, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        return self._hold(unit).flat.as_strided(size, stride, offset)

    def _hold(self, unit: Unit) -> Buffer:
        buffer = self._start(unit)
        if buffer.gathering:
            buffer.wait()
            for item, flat in zip(unit.buckets, unit.split(buffer.flat), strict=True):
                item.bucket.adopt(flat)
        return buffer

    def _start(self, unit: Unit) -> Buffer:
        """The buffer that holds the unit, or will when its gathers have ended."""
        for buffer in self._buffers:
            if buffer.holds is unit:
                return buffer
        buffer = self._vacant()
        self._clear(buffer)
        buffer.holds = unit
        buffer.gathering = [
            gather(item, flat) for item, flat in zip(unit.buckets, unit.split(buffer.flat), strict=True)
        ]
        return buffer

    def _vacant(self) -> Buffer:
        """The buffer that is not in use: nothing reads its contents after the work that is queued now."""
        if not self._buffers:
            size, like = max(unit.numel for unit in self._units), self._units[0].buckets[0].shard
            self._buffers = [Buffer(like.new_zeros(size)) for _ in range(BUFFERS)]
        others = [buffer for buffer in self._buffers if buffer is not self._current]
        return next((buffer for buffer in others if buffer.holds is None), others[0])

    def _clear(self, buffer: Buffer) -> None:
        """Wait for gathers that were never used, and take the memory away from the parameters."""
        if buffer.holds is None:
            return
        buffer.wait()
        for item in buffer.holds.buckets:
            item.bucket.release()
        buffer.holds = None


def gather(item: ShardedBucket, flat: Tensor) -> Pending:
    """Start to fill `flat` with all ranks' shards of a bucket."""
    item.wait()
    item.communicator.shard(flat).copy_(item.shard)
    return item.communicator.all_gather(flat)
