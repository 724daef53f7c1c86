"""By-products of a forward pass: router losses and hidden states, named tensors per layer.

One object per micro-batch, passed explicitly.

Filled by the blocks of one forward pass; owned by the caller of `Decoder.forward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.tensor_group import group_size


class Aux:
    """Named tensors per layer. Keeps the first value of a name, so that a recomputed block changes nothing."""

    def __init__(self, loss_weights: Mapping[str, float] | None = None, group: ProcessGroup | None = None) -> None:
        """`loss_weights`: by name, the weight of a loss in what backward runs on; the others have no gradient.

        `group`: the ranks that have the other tokens of the micro-batch, each as many (context parallelism).
        """
        self.values: dict[tuple[int, str], Tensor] = {}
        self.loss_weights = dict(loss_weights or {})
        self._group = group

    @property
    def num_shares(self) -> int:
        """Ranks that have a share of the micro-batch's tokens."""
        return group_size(self._group)

    def sum_of_shares(self, counts: Tensor) -> Tensor:
        """Return the sum of integers over those ranks; it has no gradient."""
        if self._group is None:
            return counts
        total = counts.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def put(self, layer: int, name: str, tensor: Tensor) -> None:
        self.values.setdefault((layer, name), tensor)

    def carry(self, x: Tensor, layer: int, losses: Mapping[str, Tensor]) -> Tensor:
        """Put the losses, and return x, whose backward also begins that of each loss with its weight.

        So a loss needs no place in the sum that backward runs on: it works in a stage of a pipeline, and its gradient
        comes when the layer's weights are at hand.
        """
        for name, loss in losses.items():
            self.put(layer, name, loss.detach())
            if weight := self.loss_weights.get(name):
                x = CarryLoss.apply(x, loss, weight)
        return x

    def named(self, name: str) -> list[Tensor]:
        """The tensors of one name in layer order."""
        return [self.values[key] for key in sorted(self.values) if key[1] == name]


class CarryLoss(torch.autograd.Function):
    """Forward: x. Backward: x's gradient, and the weight as the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.saved_tensors[0], ctx.weight), None
