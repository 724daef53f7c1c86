"""The time until which the next step can be left open for requests that arrive. Pure.

With overlap the next step is prepared while the device computes one. Prepared at once, it shuts out every request that
arrives during that time, by a whole step. So the core waits with it until shortly before the device needs it. How long
a step takes is known from the last ones of the same size. Nothing waits for a size of which fewer than two are known:
the first one may have loaded a kernel.

Asked by the engine, which notes how long the device computed every step: the host alone sees only that a step has
ended, and takes its own delay for the device's.
"""

from __future__ import annotations

from collections import deque

MARGIN_S = 0.0015
"""Time in which the host schedules and launches a step, and some to spare."""
RECENT = 4
"""Steps of one size that the next one is expected to be as short as."""
FEWEST = 2
"""Steps of one size from which on the next one is foreseen."""
TOKENS_PER_CLASS = 16


class StepClock:
    """Durations of steps on the device, by size."""

    def __init__(self) -> None:
        self._recent: dict[tuple[bool, int], deque[float]] = {}

    def record(self, size: tuple[bool, int], duration_s: float) -> None:
        """Note for how long the device computed a step. `size`: whether it has prompts, and its tokens."""
        self._recent.setdefault(_class(size), deque(maxlen=RECENT)).append(duration_s)

    def open_until(self, size: tuple[bool, int], began_s: float) -> float:
        """Time until which the step after one of this size may be left open; `began_s` if too little is known."""
        recent = self._recent.get(_class(size), ())
        return began_s + max(min(recent) - MARGIN_S, 0.0) if len(recent) >= FEWEST else began_s


def _class(size: tuple[bool, int]) -> tuple[bool, int]:
    has_prompts, num_tokens = size
    return has_prompts, num_tokens // TOKENS_PER_CLASS
