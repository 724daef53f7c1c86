"""Rows of blocks on their way to a GPU, in one copy with the room for their sums, which come back in one copy, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StagedRows:
    """Lists of rows, all of one length. Made and read back within one stream."""

    def __init__(self, lists: Sequence[Sequence[int]], device: torch.device) -> None:
        """`lists`: each of B row numbers, B at least 1."""
        count = len(lists[0])
        pad = [0] * (count % 2)  # so that every list begins at 16 bytes: a kernel is compiled for that
        numbers = [number for rows in (*lists, [0] * count) for number in (*rows, *pad)]
        pinned_LP = torch.tensor(numbers, dtype=torch.int64).pin_memory().view(len(lists) + 1, -1)
        on_device_LP = pinned_LP.to(device, non_blocking=True)
        self._pinned_B = pinned_LP[-1, :count]
        self.rows = tuple(on_device_LP[:-1, :count])
        """[B] int64 on the device, one for each list."""
        self.sums_B = on_device_LP[-1, :count]
        """[B] int64 on the device: zeros."""

    def read_back(self) -> Tensor:
        """[B] int64 in pinned memory: the sums, once the current stream has done what it was given."""
        return self._pinned_B.copy_(self.sums_B, non_blocking=True)
