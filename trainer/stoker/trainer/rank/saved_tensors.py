"""What autograd keeps for backward: tensors themselves, or a way to get them back.

Used by the training step's forward pass. ZeRO stage 3 gathers weights again, selective checkpointing computes cheap
results again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

Restore = Callable[[], Tensor]
"""Returns a tensor's values in backward. Called once for each use."""


class Keeper(Protocol):
    """Knows some tensors that need not be kept."""

    def restore_of(self, tensor: Tensor) -> Restore | None:
        """A way to get the values of `tensor` back in backward; None when it must be kept."""
        ...


def saved_tensors(keepers: Sequence[Keeper]) -> AbstractContextManager[object]:
    """Operations inside of this context keep only what none of the keepers can restore.

    A `torch.utils.checkpoint` inside of it keeps what it needs by itself.
    """
    if not keepers:
        return nullcontext()

    def pack(tensor: Tensor) -> Tensor | Restore:
        for keeper in keepers:
            if (restore := keeper.restore_of(tensor)) is not None:
                return restore
        return tensor.detach()  # not the tensor: an output would hold the node that holds it

    def unpack(held: Tensor | Restore) -> Tensor:
        return held if isinstance(held, Tensor) else held()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
