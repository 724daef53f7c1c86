"""Collectives of the GPUs of one host as copies by their copy engines: multiprocessors are left to products.

NCCL's kernels occupy thread blocks while they copy and while they wait. All that the trainer's collectives do is to
move bytes, so here each rank copies them itself, between memory that all ranks have mapped: in a reduce-scatter it
writes its slices into the others' memory, in an all-gather it reads the others' slices out of theirs. In between the
ranks *meet*: a kernel of one block waits until every rank has come so far. The sums are those of `communicator`, in the
same order, so the bits are the same.

Made by `communicator_maker` where all ranks of a group are in one pod and can map each other's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.model.mapped_memory import map_memory
from stoker.trainer.rank.communicator import Groups, Pending, Total, exchange_numbers
from stoker.trainer.rank.ordered_sum import sum_in_order

STEP_BYTES = 32 * 2**20
"""Memory of a lane grows by whole multiples, so that buckets of nearly the same length do not map it anew."""


class Lane(Protocol):
    """A queue of work beside the computation, and memory that all ranks have mapped, as long on each of them.

    All ranks use a lane in the same order.
    """

    def begin(self, num_bytes: int) -> AbstractContextManager[object]:
        """What is queued inside runs in the lane, after all that is queued now; it uses so much memory."""
        ...

    def memory(self, rank: int, like: Tensor) -> Tensor:
        """The beginning of a rank's memory, as long as a tensor and of its dtype."""
        ...

    def meet(self) -> None:
        """What is queued from now on runs after what every rank has queued before it meets."""
        ...

    def end(self) -> Pending:
        """The end of what is queued now."""
        ...


class CopyEngines:
    """Ranks on GPUs of one host. Reductions and gathers have a lane each, so neither waits for the other."""

    eager, replicas, replica = True, 1, 0

    def __init__(self, rank: int, size: int, groups: Groups, reductions: Lane, gathers: Lane) -> None:
        self.rank, self.size = rank, size
        self._groups, self._reductions, self._gathers = groups, reductions, gathers
        self._peers = [(rank + step) % size for step in range(size)]
        """All ranks from this one on: no two ranks copy to the same one at once."""

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(self.size, -1)[self.rank]

    def reduce_scatter(
        self,
        flat: Tensor,
        out: Tensor,
        *,
        add: bool = False,
        total: Total = sum_in_order,
        last: bool = True,  # noqa: ARG002  no replicas
    ) -> Pending:
        lane, slices = self._reductions, flat.view(self.size, -1)
        with lane.begin(flat.nbytes):
            lane.meet()  # every rank has summed what came before
            for peer in self._peers:
                self.shard(lane.memory(peer, flat)).copy_(slices[peer], non_blocking=True)
            lane.meet()
            total(self._groups.rows(lane.memory(self.rank, flat)), out, add=add)
            return lane.end()

    def all_gather(self, flat: Tensor) -> Pending:
        lane, slices = self._gathers, flat.view(self.size, -1)
        with lane.begin(slices[0].nbytes):
            lane.meet()  # every rank has read what came before
            lane.memory(self.rank, slices[0]).copy_(slices[self.rank], non_blocking=True)
            lane.meet()
            for peer in self._peers[1:]:
                slices[peer].copy_(lane.memory(peer, slices[0]), non_blocking=True)
            return lane.end()

    def exchange(self, numbers: Tensor) -> Tensor:
        return exchange_numbers(numbers, self.size, self._groups.gather)


class CudaLane:
    """A stream of this rank's GPU."""

    def __init__(self, group: torch.distributed.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        """Collective. Raises RuntimeError where the memory cannot be mapped."""
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._memory: Tensor | None = None
        self._mapping: Any = None
        self._map(num_bytes)

    def begin(self, num_bytes: int) -> AbstractContextManager[object]:
        if num_bytes > self.num_bytes:
            self._map(num_bytes)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def memory(self, rank: int, like: Tensor) -> Tensor:
        found: Tensor = self._mapping.get_buffer(rank, (like.numel(),), like.dtype)
        return found

    def meet(self) -> None:
        self._mapping.barrier()

    def end(self) -> Pending:
        done = self._stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self._device).wait_event(done))

    def _map(self, num_bytes: int) -> None:
        """Take longer memory (collective). Copies in flight end first; what others have mapped lives on in them."""
        torch.cuda.synchronize(self._device)
        self._memory = self._mapping = None
        self.num_bytes = -(-num_bytes // STEP_BYTES) * STEP_BYTES
        self._memory, self._mapping = map_memory(self.num_bytes, torch.uint8, self._group)
