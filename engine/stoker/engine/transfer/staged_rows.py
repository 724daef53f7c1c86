"""Rows of blocks on their way to a GPU, in one copy with the room for their sums, which come back in one copy, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StagedRows:
    """Lists of rows, all of one length. Made and read back within one stream."""

    def __init__(self, lists: Sequence[Sequence[int]], device: torch.device, sums: int = 1) -> None:
        """`lists`: each of B row numbers, B at least 1. `sums`: of each row."""
        count = len(lists[0])
        pad = [0] * (count % 2)  # so that every list begins at 16 bytes: a kernel is compiled for that
        length, places = count + len(pad), count * sums
        numbers = [number for rows in lists for number in (*rows, *pad)]
        pinned = torch.tensor([*numbers, *[0] * places], dtype=torch.int64).pin_memory()
        on_device = pinned.to(device, non_blocking=True)
        self._pinned_S = pinned[len(numbers) :]
        self.rows = tuple(on_device[place * length : place * length + count] for place in range(len(lists)))
        """[B] int64 on the device, one for each list."""
        self.sums_S = on_device[len(numbers) :]
        """[B x sums] int64 on the device: zeros."""

    def read_back(self) -> Tensor:
        """[B x sums] int64 in pinned memory: the sums, once the current stream has done what it was given."""
        return self._pinned_S.copy_(self.sums_S, non_blocking=True)
