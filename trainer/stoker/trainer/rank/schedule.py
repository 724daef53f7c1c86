"""The learning rate as a pure function of the step: warm-up, then constant, linear or cosine.

Called by the loop at each step.
"""

from __future__ import annotations

import math

from stoker.trainer.protocol.config import OptimizationConfig


def learning_rate(config: OptimizationConfig, step: int, total_steps: int) -> float:
    """The rate of the update of step `step` (the first update is step 1).

    Warm-up rises linearly and reaches the full rate at step `warmup_steps`; the next step has it too. Linear and cosine
    then fall and would reach `min_learning_rate` one step after the last, so that no update is wasted on a rate of
    zero.
    """
    peak, floor, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup - 1) / max(1, total_steps - warmup))
    if config.schedule == "constant":
        return peak
    if config.schedule == "linear":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
