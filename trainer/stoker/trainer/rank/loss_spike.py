"""The guard against loss spikes: a loss that lies far above those of the last steps.

Pure and the same on every rank, because every rank sees the same losses. The loop owns it; its state is in every
checkpoint, so that a resumed run decides alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, pstdev
from typing import Any

WINDOW = 64
"""Losses that the limit depends on."""
WARM_UP = 20
"""Losses before there is a limit."""
DEVIATIONS = 6.0
SMALLEST_DEVIATION = 0.02
"""Of the mean: a run whose losses hardly differ has no spikes below 12 % above it."""
NEW_LEVEL = 8
"""Spikes in a row that are a new level: the history begins anew with the last of them."""


class LossHistory:
    """The losses of the last steps without a spike."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """A loss above it is a spike; infinite while there are too few losses."""
        if len(self._losses) < WARM_UP:
            return math.inf
        mean = fmean(self._losses)
        return mean + DEVIATIONS * max(pstdev(self._losses, mean), SMALLEST_DEVIATION * abs(mean))

    def add(self, loss: float) -> bool:
        """Add the loss of a step; True when it is a spike."""
        is_spike = loss > self.limit
        self._in_a_row = self._in_a_row + 1 if is_spike else 0
        if self._in_a_row == NEW_LEVEL:
            self._losses.clear()
            self._in_a_row = 0
        if not is_spike or not self._losses:
            self._losses.append(loss)
        return is_spike

    def begin_anew(self, loss: float) -> None:
        """Take a loss for the first of a new level."""
        self._losses.clear()
        self._losses.append(loss)
        self._in_a_row = 0

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state; one that was written without this guard has none."""
        if state is not None:
            self._losses = deque((float(loss) for loss in state["losses"]), maxlen=WINDOW)
            self._in_a_row = int(state["in_a_row"])
