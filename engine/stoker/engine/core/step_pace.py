"""Durations of recent steps, and the longest silence of the core that follows from them. Pure; owned by the core's
loop.

The core announces that silence with each heartbeat, and fronts compare (`core_watch`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT_STEPS = 200
"""Steps per class of size that the announced silence is computed from."""


@dataclass(frozen=True)
class QuietLimits:
    """Bounds of the announced silence. The defaults suit a machine with other work to do."""

    floor_s: float = 10.0
    """Least silence. A healthy loop sends every second, but a busy machine may keep it from running for a while."""
    factor: float = 5.0
    """Multiple of the longest recent step of the same size; a failed step is computed again in halves."""
    first_s: float = 120.0
    """For work without precedent: loading, the first step of each size (kernels are compiled), capture of graphs."""


class StepPace:
    """Durations of recent steps, by size. Sizes are classes of the number of tokens: powers of two."""

    def __init__(self, limits: QuietLimits) -> None:
        self.limits = limits
        self._by_class: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=RECENT_STEPS)

    def record(self, num_tokens: int, seconds: float) -> None:
        """Note a step. A longer one than announced counts as long as announced, so that one stop of the process for
        minutes does not make the next limit one of hours."""
        seconds = min(seconds, self.quiet_s(num_tokens))
        self._by_class.setdefault(num_tokens.bit_length(), deque(maxlen=RECENT_STEPS)).append(seconds)
        self._all.append(seconds)

    def quiet_s(self, num_tokens: int) -> float:
        """Longest healthy silence while a step of this size runs."""
        recent = self._by_class.get(num_tokens.bit_length())
        if not recent:
            return max(self.limits.first_s, self.limits.floor_s)
        return max(self.limits.floor_s, self.limits.factor * max(recent))

    @property
    def usual_step_s(self) -> float | None:
        """The median of recent steps; None before the first."""
        return median(self._all) if self._all else None
