"""A tied table at both ends of a pipeline: embedding on the first stage, output layer on the last.

Both ends hold it with its state. After the reduction each rank adds the gradient of its twin at the other end, in the
same order on both, so that equal states stay equal. The first stage counts it in the norm and saves it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class TableState(Protocol):
    """The table's bucket on this rank."""

    gradient: Tensor
    """The reduced gradient, fp32."""
    squares: Tensor
    """Its squares as the norm counts them."""

    def square(self) -> None: ...


class TiedTable:
    """One end of the pair. The ranks of a pair differ on the pipeline axis alone."""

    def __init__(self, state: TableState, pipeline: dist.ProcessGroup) -> None:
        """`pipeline`: the ranks of one pipeline, in the order of their stages."""
        self._state = state
        self._group = pipeline
        self._is_first = dist.get_rank(pipeline) == 0
        self._peer = dist.get_world_size(pipeline) - 1 if self._is_first else 0

    def add_gradients(self) -> None:
        """Make the gradient of both ends their sum (collective over the two)."""
        mine = self._state.gradient
        theirs = self._exchange(mine)
        first, last = (mine, theirs) if self._is_first else (theirs, mine)
        torch.add(first, last, out=mine)
        if self._is_first:
            self._state.square()
        else:
            self._state.squares.zero_()

    def _exchange(self, mine: Tensor) -> Tensor:
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=self._peer),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=self._peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return theirs
