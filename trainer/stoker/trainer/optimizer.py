"""Adam and AdamW on flat shards: torch's fused kernel over the decayed and the plain region."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.trainer.config import OptimizationConfig


class Adam:
    """The update rule. State (moments) belongs to the caller; the same shard layout gives the same bits, and so does any cut at whole lines.

    `adamw` decays weights directly (decoupled); `adam` adds the decay to the gradient.
    """

    def __init__(self, config: OptimizationConfig) -> None:
        self._config = config
        self._kernel = torch._fused_adamw_ if config.optimizer == "adamw" else torch._fused_adam_

    def update(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        decay_end: int,
        step: int,
        learning_rate: float,
    ) -> None:
        """Update fp32 `master` and moments in place; elements [0, decay_end) decay. `step` counts from 1."""
        regions = [(0, decay_end, self._config.weight_decay), (decay_end, master.numel(), 0.0)]
        for start, end, decay in regions:
            if start < end:
                part = slice(start, end)
                self._region((master[part], grad[part], exp_avg[part], exp_avg_sq[part]), decay, step, learning_rate)

    def _region(
        self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], decay: float, step: int, learning_rate: float
    ) -> None:
        master, grad, exp_avg, exp_avg_sq = tensors
        self._kernel(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(step), device=master.device)],
            lr=learning_rate,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            weight_decay=decay,
            eps=self._config.epsilon,
            amsgrad=False,
            maximize=False,
        )
