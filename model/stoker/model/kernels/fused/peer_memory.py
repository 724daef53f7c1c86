"""The memory of a host's GPUs as one rank sees it: where sums over peers' memory store rows, and which rows they take.

A value. Made by the engine's `peer_sums`, read by `peer_sum` and `two_shot_sum`, each of which lays the memory out in
its own way and changes it and the counts.

T rows, D columns, W words of a row (4 bytes: one float32, or two values of 2 bytes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD_BYTES = 4
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Type of the values -> its number in the kernels."""


class PeerMemory(NamedTuple):
    """The mapped memory of all ranks, zero at the beginning, and the calls that this rank has made."""

    rank: int
    addresses: tuple[int, ...]
    """Where each rank's memory is mapped in this process, then an int32 that the host sets to end all waiting. They are
    arguments of the kernels: read from memory, each would be waited for on the way of every message."""
    calls: Tensor
    """int32: calls that each program of the kernel has made."""
    max_rows: int
    """In two shots a multiple of the number of ranks."""
    max_words: int
    """A multiple of the `VECTOR_WORDS` of the kernels."""

    @property
    def ranks(self) -> int:
        return len(self.addresses) - 1

    def fits(self, x_TD: Tensor) -> bool:
        """Whether rows can be summed here."""
        return (
            x_TD.dim() == 2
            and 0 < x_TD.shape[0] <= self.max_rows
            and x_TD.dtype in KINDS
            and x_TD.shape[1] * x_TD.itemsize % WORD_BYTES == 0
            and x_TD.shape[1] * x_TD.itemsize // WORD_BYTES <= self.max_words
        )
