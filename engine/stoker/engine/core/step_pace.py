"""How long steps take here, and for how long the core may therefore be silent. Pure; the core's loop owns it.

The core promises its fronts a longest silence with each heartbeat. A front needs no figures of its own: it compares the
silence with the last promise (`core_watch`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT_STEPS = 200
"""Per class of size: what the promise is computed from."""


@dataclass(frozen=True)
class QuietLimits:
    """Bounds of the promised silence. The defaults suit a machine that has other work to do."""

    floor_s: float = 10.0
    """A healthy loop is heard every second; a process that gets no processor for a while is healthy, too."""
    factor: float = 5.0
    """Times the longest recent step of the same size. A failed step is computed again in halves, at most a few times."""
    first_s: float = 120.0
    """What has no precedent: loading, the first step of each size (kernels are compiled), capture of graphs."""


class StepPace:
    """Durations of recent steps, by size. Sizes are classes of the number of tokens: powers of two."""

    def __init__(self, limits: QuietLimits) -> None:
        self.limits = limits
        self._by_class: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=RECENT_STEPS)

    def record(self, num_tokens: int, seconds: float) -> None:
        """Note a step. One that took longer than it was promised counts as long as the promise: a process that was
        stopped for minutes does not make the next promise one of hours."""
        seconds = min(seconds, self.quiet_s(num_tokens))
        self._by_class.setdefault(num_tokens.bit_length(), deque(maxlen=RECENT_STEPS)).append(seconds)
        self._all.append(seconds)

    def quiet_s(self, num_tokens: int) -> float:
        """The longest silence to expect while a step of this size runs."""
        recent = self._by_class.get(num_tokens.bit_length())
        if not recent:
            return max(self.limits.first_s, self.limits.floor_s)
        return max(self.limits.floor_s, self.limits.factor * max(recent))

    @property
    def usual_step_s(self) -> float | None:
        """The median of recent steps; None before the first."""
        return median(self._all) if self._all else None
