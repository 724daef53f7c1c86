"""The sums of a group of GPUs: short messages by one kernel over peers' memory, long ones by NCCL.

The memory is mapped into every rank's process once, at the start (torch's symmetric memory; NVLink multicast is never
used). Where it cannot be mapped on every rank, all of them sum over NCCL alone, and the log says why.

Made by `load`; called by the model's layers.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.ops import Ops

log = logging.getLogger("stoker.engine")

INBOX_BYTES = 128 * 2**20
"""Largest inbox of a rank."""
MOST_BYTES = {2: 4 * 2**20, 4: 2**20, 8: 512 * 2**10}
"""Longest message that is summed over peers' memory, by the largest number of ranks: each rank sends it whole to all
others, twice as many bytes as it has. Behind it NCCL is faster: measured for two ranks, estimated for more."""


def group_sums(plan: EnginePlan, config: ModelConfig, ops: Ops, group: ProcessGroup | None) -> GroupSums | None:
    """The sums of a rank's group; None for one rank. Called by all ranks together."""
    if group is None:
        return None
    sums = GroupSums(group, ops, ordered=plan.deterministic)
    if plan.device != "cuda" or ops.kernels != "fused" or plan.pods > 1:
        return sums  # memory of another host's GPUs cannot be mapped
    return peer_sums(sums, config.hidden_size, plan.dtype) or sums


def peer_sums(sums: GroupSums, columns: int, dtype: torch.dtype, most_bytes: int | None = None) -> PeerSums | None:
    """Map the inboxes of all ranks; None where that fails on one of them. Returns when all inboxes are empty."""
    most_bytes = longest_message(sums.size) if most_bytes is None else most_bytes
    peers, problem = None, "another rank cannot map it"
    try:
        peers = PeerSums(sums, columns, dtype, most_bytes)
    except (RuntimeError, ImportError, OSError) as error:
        problem = str(error)
    if sums.agree(peers is not None):
        return peers
    log.warning("sums of short messages go over NCCL, because the GPUs' memory cannot be mapped: %s", problem)
    return None


def longest_message(ranks: int) -> int:
    return next((most for size, most in MOST_BYTES.items() if ranks <= size), 0)


class PeerSums(GroupSums):
    """Sums over peers' memory up to some length, then over the group."""

    def __init__(self, sums: GroupSums, columns: int, dtype: torch.dtype, most_bytes: int) -> None:
        """Raises RuntimeError where the memory cannot be mapped."""
        super().__init__(sums.group, sums.ops, ordered=sums.ordered)
        from stoker.model.kernels.fused import peer_sum  # imports triton, which a machine without a GPU may lack

        self.kernels = peer_sum
        max_words = -(-columns * dtype.itemsize // peer_sum.WORD_BYTES)
        row_bytes = 8 * peer_sum.inbox_words(self.size, 1, max_words)
        max_rows = min(most_bytes // (columns * dtype.itemsize), INBOX_BYTES // row_bytes)
        if not max_rows:
            raise RuntimeError(f"a row of {columns} values over {self.size} ranks is longer than {most_bytes} bytes")
        self.memory, self.handle = map_inbox(peer_sum.inbox_words(self.size, max_rows, max_words), self.group)
        device = self.memory.device
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Read by kernels that wait."""
        addresses = [int(address) for address in self.handle.buffer_ptrs]
        self.inboxes = peer_sum.Inboxes(
            rank=self.rank,
            addresses=torch.tensor([*addresses, self.stop.data_ptr()], dtype=torch.int64, device=device),
            calls=torch.zeros(peer_sum.PROGRAMS, dtype=torch.int32, device=device),
            max_rows=max_rows,
            max_words=max_words,
        )

    def begin(self, partial_TD: Tensor) -> Tensor:
        return partial_TD if self.inboxes.fits(partial_TD) else super().begin(partial_TD)

    def sum(self, partial_TD: Tensor) -> Tensor:
        if not self.inboxes.fits(partial_TD):
            return super().sum(partial_TD)
        self.calls += 1
        return self.kernels.sum_rows(partial_TD, self.inboxes)

    def sum_norm(self, partial_TD: Tensor, x_TD: Tensor, norm_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `GroupSums`; the kernel of few rows adds up a row's squares in another order than that of many."""
        if self.ordered or not self.inboxes.fits(partial_TD):
            return super().sum_norm(partial_TD, x_TD, norm_D, eps)
        self.calls += 1
        return self.kernels.sum_norm_rows(partial_TD, x_TD, norm_D, eps, self.inboxes)

    def abort(self) -> None:
        self.stop[0] = 1
        super().abort()


def map_inbox(words: int, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Allocate this rank's inbox, zeroed, and map those of all ranks; return it and the handle of the mapping.

    Called by all ranks together. Raises RuntimeError.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # its failure takes all GPUs of the host down
    device = torch.device("cuda", torch.cuda.current_device())
    inbox = symmetric_memory.empty(words, dtype=torch.int64, device=device).zero_()
    torch.cuda.synchronize(device)
    return inbox, symmetric_memory.rendezvous(inbox, group)
