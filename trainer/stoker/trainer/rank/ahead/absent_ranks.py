"""Communicators of ranks that are not there: nothing is sent, and the sums of what would arrive are launched.

Process groups are torch's own fake ones, which end every collective at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stoker.trainer.protocol.parallel_dims import ParallelDims, Ranks
from stoker.trainer.rank.communicator import DONE, Communicator, Pending, Total
from stoker.trainer.rank.mesh import AxisGroups, Mesh, open_mesh
from stoker.trainer.rank.ordered_sum import sum_in_order


class AssumedGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]  # a property of C
            return True
        return func(*args, **(kwargs or {}))


class AbsentRanks:
    """One rank of a group whose other ranks are not there; to its callers like NCCL's, or like a single rank's."""

    replicas, replica = 1, 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.eager = rank, size, size > 1

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
        received = flat if self.size == 1 else torch.empty_like(flat)
        with AssumedGpu():
            total(list(received.view(self.size, -1).unbind(0)), out, add=add)
        return DONE

    def all_gather(self, flat: Tensor) -> Pending:  # noqa: ARG002  nothing arrives
        return DONE

    def exchange(self, numbers: Tensor) -> Tensor:
        return numbers.expand(self.size, *numbers.shape).clone()


class AbsentGroups(AxisGroups):
    """Groups of one rank with others that are not there."""

    def __init__(self, rank: int) -> None:
        super().__init__(torch.device("cpu"))
        self._rank = rank

    def communicator(self, groups: Sequence[Ranks]) -> Communicator | None:
        """See `AxisGroups`."""
        own = next(group for group in groups if self._rank in group)
        return AbsentRanks(sorted(own).index(self._rank), len(own))


@contextmanager
def absent_mesh(dims: ParallelDims, rank: int, *, any_data_parallel: bool = False) -> Iterator[Mesh]:
    """The mesh of one rank of a grid. It is the process's only process group inside."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    hook = sys.excepthook
    if dims.world_size > 1:
        dist.init_process_group("fake", rank=rank, world_size=dims.world_size, store=FakeStore())
    try:
        mesh = open_mesh(dims, AbsentGroups(rank), any_data_parallel=any_data_parallel)
        assert mesh is not None
        yield mesh
    finally:
        if dims.world_size > 1:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch puts the rank's number before every line, once for each group
