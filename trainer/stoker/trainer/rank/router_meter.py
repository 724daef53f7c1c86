"""The routers of a model with experts during one step: their losses, and the tokens that each expert got.

A loss of a micro-batch counts as often as the micro-batch has targets, so the sum over the step does not depend on the
ranks that computed it. L layers with experts, E experts.

Owned by the training step. Models without experts have a meter that does nothing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.experts import BALANCE, TOKENS, Z


@dataclass(frozen=True)
class RouterReport:
    """The routers over one step, all ranks together."""

    balance_loss: float
    """Mean over the layers; the number of experts of a token where the load is even."""
    z_loss: float
    expert_tokens: tuple[int, ...]
    """Rows of each expert, summed over the layers."""
    imbalance: float
    """Rows of the fullest expert over those of the mean expert, in the layer where that is most."""


class RouterMeter:
    """Collects what the blocks of one rank put into `Aux`, micro-batch by micro-batch."""

    def __init__(
        self, config: ModelConfig, layers: Container[int], device: torch.device, group: ProcessGroup | None = None
    ) -> None:
        """`layers`: those that this rank computes. `group`: the ranks that have other tokens of its micro-batches."""
        self._group = group
        self._config = config
        self._num_layers, self._num_experts = len(config.expert_layers), config.num_experts or 0
        self._own = [index for index, layer in enumerate(config.expert_layers) if layer in layers]
        self._losses = torch.zeros(2 if self._num_layers else 0, dtype=torch.float64, device=device)
        self._tokens_LE = torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64, device=device)

    @property
    def width(self) -> int:
        """How many numbers `take` returns."""
        return len(self._losses) + self._tokens_LE.numel()

    def new_aux(self, num_targets: float) -> Aux | None:
        """Return the collector of a micro-batch whose losses count `num_targets` times; None without experts here."""
        if not self._own:
            return None
        weights = {BALANCE: self._config.router_aux_loss_coef, Z: self._config.router_z_loss_coef}
        return Aux({name: weight * num_targets / self._num_layers for name, weight in weights.items()}, self._group)

    def add(self, aux: Aux | None, num_targets: float) -> None:
        """Note one micro-batch after its forward pass."""
        if aux is None:
            return
        sums = torch.stack([torch.stack(aux.named(name)).sum() for name in (BALANCE, Z)])
        self._losses += sums * (num_targets / self._num_layers)
        self._tokens_LE[self._own] += torch.stack(aux.named(TOKENS))

    def take(self) -> Tensor:
        """Return this rank's sums over the step, float64 [`width`], and begin anew."""
        numbers = torch.cat([self._losses, self._tokens_LE.flatten()])
        self._losses.zero_()
        self._tokens_LE.zero_()
        return numbers

    def report(self, totals: Tensor, target_tokens: int) -> RouterReport | None:
        """Read the sums of all ranks, on the host; None for a model without experts."""
        if not self.width:
            return None
        balance, z = (totals[:2] / target_tokens).tolist()
        tokens_LE = totals[2:].view(self._num_layers, self._num_experts)
        fullest_L = tokens_LE.amax(1) / tokens_LE.mean(1)
        tokens = tuple(int(count) for count in tokens_LE.sum(0).tolist())
        return RouterReport(balance, z, tokens, float(fullest_L.max()))
