"""The sums of a group of GPUs: short messages by one kernel over peers' memory, in one or two shots, long ones by NCCL.

The memory is mapped into every rank's process once, at the start (torch's symmetric memory; NVLink multicast is never
used). Where it cannot be mapped on every rank, all of them sum over NCCL alone, and the log says why.

Made by `load`; called by the model's layers.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.fused.peer_memory import WORD_BYTES, PeerMemory
from stoker.model.kernels.ops import Ops

log = logging.getLogger("stoker.engine")

INBOX_BYTES = 128 * 2**20
"""Largest inbox of a rank."""


class Longest(NamedTuple):
    """The longest message, in bytes, of each way over peers' memory; 0: no message goes that way."""

    one_shot: int
    """Each rank sends it whole to all others, twice as many bytes as it has."""
    two_shot: int
    """Each rank sends it twice less a share, but waits for others twice."""


LONGEST = {2: Longest(3 * 2**19, 2**24), 4: Longest(2**18, 2**23), 8: Longest(2**17, 2**23)}
"""By the largest number of ranks. Behind both NCCL is faster."""


def group_sums(plan: EnginePlan, config: ModelConfig, ops: Ops, group: ProcessGroup | None) -> GroupSums | None:
    """The sums of a rank's group; None for one rank. Called by all ranks together."""
    if group is None:
        return None
    sums = GroupSums(group, ops, ordered=plan.deterministic)
    if plan.device != "cuda" or ops.kernels != "fused" or plan.pods > 1:
        return sums  # memory of another host's GPUs cannot be mapped
    return peer_sums(sums, config.hidden_size, plan.dtype) or sums


def peer_sums(sums: GroupSums, columns: int, dtype: torch.dtype, longest: Longest | None = None) -> PeerSums | None:
    """Map the memory of all ranks; None where that fails on one of them. Returns when all of it is empty."""
    peers, problem = None, "another rank cannot map it"
    try:
        peers = PeerSums(sums, columns, dtype, longest_of(sums.size) if longest is None else longest)
    except (RuntimeError, ImportError, OSError) as error:
        problem = str(error)
    if sums.agree(peers is not None):
        return peers
    log.warning("sums of short messages go over NCCL, because the GPUs' memory cannot be mapped: %s", problem)
    return None


def longest_of(ranks: int) -> Longest:
    return next((longest for size, longest in LONGEST.items() if ranks <= size), Longest(0, 0))


class Way(NamedTuple):
    """One way over peers' memory: its kernels and the memory that they use."""

    kernels: Any
    """`peer_sum` or `two_shot_sum`."""
    memory: PeerMemory
    handle: Any
    """Keeps the memory mapped."""


class PeerSums(GroupSums):
    """Sums over peers' memory up to some length, then over the group."""

    def __init__(self, sums: GroupSums, columns: int, dtype: torch.dtype, longest: Longest) -> None:
        """Raises RuntimeError where the memory cannot be mapped."""
        super().__init__(sums.group, sums.ops, ordered=sums.ordered)
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Read by kernels that wait."""
        row_bytes = columns * dtype.itemsize
        most_rows = (longest.one_shot // row_bytes, longest.two_shot // row_bytes)
        if not any(most_rows):
            raise RuntimeError(f"a row of {columns} values over {self.size} ranks is longer than {max(longest)} bytes")
        makers = (self._one_shot, self._two_shot)
        self.ways = [make(rows, row_bytes) for make, rows in zip(makers, most_rows, strict=True) if rows]

    def _one_shot(self, rows: int, row_bytes: int) -> Way:
        from stoker.model.kernels.fused import peer_sum  # imports triton, which a machine without a GPU may lack

        max_words = round_up(-(-row_bytes // WORD_BYTES), peer_sum.VECTOR_WORDS)
        max_rows = max(min(rows, INBOX_BYTES // (8 * peer_sum.inbox_words(self.size, 1, max_words))), 1)
        inbox, handle = map_memory(peer_sum.inbox_words(self.size, max_rows, max_words), torch.int64, self.group)
        calls = torch.zeros(peer_sum.PROGRAMS, dtype=torch.int32, device=inbox.device)
        return Way(peer_sum, PeerMemory(self.rank, self._addresses(handle), calls, max_rows, max_words), handle)

    def _two_shot(self, rows: int, row_bytes: int) -> Way:
        from stoker.model.kernels.fused import two_shot_sum  # as above

        max_words = round_up(-(-row_bytes // WORD_BYTES), two_shot_sum.VECTOR_WORDS)
        max_rows = round_up(rows, self.size)
        words = two_shot_sum.memory_words(self.size, max_rows, max_words)
        memory, handle = map_memory(words, torch.int32, self.group)
        calls = torch.zeros(two_shot_sum.programs_of(self.size), dtype=torch.int32, device=memory.device)
        return Way(two_shot_sum, PeerMemory(self.rank, self._addresses(handle), calls, max_rows, max_words), handle)

    def _addresses(self, handle: Any) -> tuple[int, ...]:
        return (*map(int, handle.buffer_ptrs), self.stop.data_ptr())

    def way_of(self, partial_TD: Tensor) -> Way | None:
        """The first way that takes the message; None: the group does."""
        return next((way for way in self.ways if way.memory.fits(partial_TD)), None)

    def begin(self, partial_TD: Tensor) -> Tensor:
        return super().begin(partial_TD) if self.way_of(partial_TD) is None else partial_TD

    def sum(self, partial_TD: Tensor) -> Tensor:
        way = self.way_of(partial_TD)
        if way is None:
            return super().sum(partial_TD)
        self.calls += 1
        total_TD: Tensor = way.kernels.sum_rows(partial_TD, way.memory)
        return total_TD

    def sum_norm(self, partial_TD: Tensor, x_TD: Tensor, norm_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `GroupSums`; the kernels of few rows add up a row's squares in another order than that of many."""
        way = None if self.ordered else self.way_of(partial_TD)
        if way is None:
            return super().sum_norm(partial_TD, x_TD, norm_D, eps)
        self.calls += 1
        normed_TD, total_TD = way.kernels.sum_norm_rows(partial_TD, x_TD, norm_D, eps, way.memory)
        return normed_TD, total_TD

    def abort(self) -> None:
        self.stop[0] = 1
        super().abort()


def map_memory(words: int, dtype: torch.dtype, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Allocate memory of this rank, zeroed, and map that of all ranks; return it and the handle of the mapping.

    Called by all ranks together. Raises RuntimeError.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # its failure takes all GPUs of the host down
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(words, dtype=dtype, device=device).zero_()
    torch.cuda.synchronize(device)
    return memory, symmetric_memory.rendezvous(memory, group)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
