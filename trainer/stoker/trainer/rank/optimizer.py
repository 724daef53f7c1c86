"""Adam and AdamW on flat shards, with the kernel of `Ops`.

Changes masters and moments in place. Called by `zero`, shard by shard.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.ops import Ops
from stoker.trainer.protocol.config import OptimizationConfig


class Adam:
    """The update rule. The caller owns the moments. Any cut of the state at whole lines gives the same bits.

    `adamw` decays weights directly (decoupled); `adam` adds the decay to the gradient.
    """

    def __init__(self, config: OptimizationConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops

    def update(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        parameters: Tensor | None,
        *,
        decay_end: int,
        step: int,
        learning_rate: float,
        scale: Tensor,
    ) -> None:
        """Update fp32 `master` and moments in place with `grad` times `scale`; round the masters into `parameters`.

        Elements [0, decay_end) decay; `step` counts from 1. `scale`: fp32 scalar on the device; one that is not finite
        changes nothing.
        """
        rule = AdamStep(
            decoupled=self._config.optimizer == "adamw",
            learning_rate=learning_rate,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            epsilon=self._config.epsilon,
            weight_decay=self._config.weight_decay,
            decay_end=decay_end,
            step=step,
        )
        self._ops.adam_(master, grad, exp_avg, exp_avg_sq, parameters, rule, scale)
