"""Communication between the ranks of a save.

It has a Gloo process group of its own, because the save thread must not use the communicators of the training.

Made by `main`; used by the saver, and at the start for the choice of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.trainer.rank.communicator import dist_rank
from stoker.trainer.rank.host_group import new_host_group


class SaveGroup:
    """Gathers JSON values to rank 0 and broadcasts them from rank 0. Only one thread per rank may use it at a time."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        data = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        largest = max(int(size) for size in sizes)
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(data)] = data
        received = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, received, group=self._group, group_dst=0)
        return [_decode(item[: int(size)]) for item, size in zip(received or [], sizes, strict=False)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        data = _encode(value)
        length = torch.tensor([len(data)])
        dist.broadcast(length, group=self._group, group_src=0)
        message = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, group=self._group, group_src=0)
        return _decode(message)


def make_save_group(ranks: Sequence[int], timeout: timedelta | None = None) -> SaveGroup | None:
    """Make the save group of these global ranks; None on other ranks (collective over the whole gang).

    `timeout` applies to one collective.
    """
    group = new_host_group(ranks, timeout) if len(ranks) > 1 else None
    if dist_rank() not in ranks:
        return None
    return SaveGroup(list(ranks).index(dist_rank()), len(ranks), group)


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.numpy().data))
