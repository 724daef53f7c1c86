"""The dynamic loss scale of fp16 training (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

Small gradients are zero in fp16 and large ones infinite. The loss is multiplied by a power of two that grows while no
gradient overflows and shrinks when one does. Every rank sees the same global gradient norm, so all have the same scale.

Owned by the training step; its state is in every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

INITIAL, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROW_AFTER = 2000
"""Steps in a row without an overflow."""


class LossScale:
    """The factor of the mean loss."""

    def __init__(self, scale: float = INITIAL, grow_after: int = GROW_AFTER) -> None:
        self.scale = scale
        self._grow_after = grow_after
        self._good_steps = 0

    def factor(self, target_tokens: int) -> float:
        """The factor of a sum of losses over `target_tokens`: a power of two, so that division by it is exact."""
        return self.scale / 2.0 ** math.floor(math.log2(max(1, target_tokens)))

    def overflows(self, is_finite: bool) -> bool:
        """Adapt the scale to a step's gradient; True when the step is skipped.

        False for a gradient that is not finite at the smallest scale: then the scale is not its cause.
        """
        if not is_finite:
            self._good_steps = 0
            could_shrink = self.scale > SMALLEST
            self.scale = max(SMALLEST, self.scale / 2)
            return could_shrink
        self._good_steps += 1
        if self._good_steps == self._grow_after:
            self._good_steps = 0
            self.scale = min(LARGEST, self.scale * 2)
        return False

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state; one that was written in another precision has none."""
        if state is not None:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
