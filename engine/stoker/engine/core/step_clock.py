"""The time until which the next step can be left open for requests that arrive. Pure.

With overlap the next step is prepared while the device computes one. Prepared at once, it shuts out every request that
arrives during that time, by a whole step. So the core waits with it until shortly before the device needs it. How long
a step takes is known from the last ones of the same size; of a size without precedent nothing is known, and nothing
waits.

Asked by the engine, which notes the end of every step.
"""

from __future__ import annotations

from collections import deque

MARGIN_S = 0.0015
"""Time in which the host schedules and launches a step, and some to spare."""
WAIT_S = 0.0002
"""A shorter wait is none: the step had ended."""
RECENT = 4
"""Steps of one size that the next one is expected to be as short as."""
TOKENS_PER_CLASS = 16


class StepClock:
    """Durations of steps on the device, by size."""

    def __init__(self) -> None:
        self._recent: dict[tuple[bool, int], deque[float]] = {}

    def record(self, size: tuple[bool, int], busy_s: float, waited_s: float) -> None:
        """Note a step that had run for `busy_s` when the host began to wait for its end, `waited_s` before it.

        Without a wait it may have ended long before, so the next one is expected to be shorter by a margin.
        `size`: whether it has prompts, and its tokens.
        """
        recent = self._recent.setdefault(_class(size), deque(maxlen=RECENT))
        if waited_s >= WAIT_S:
            recent.append(busy_s + waited_s)
        else:
            recent.append(max(min((busy_s, *recent)) - MARGIN_S, 0.0))

    def open_until(self, size: tuple[bool, int], began_s: float) -> float:
        """Time until which the step after one of this size may be left open; `began_s` if nothing is known."""
        recent = self._recent.get(_class(size))
        return began_s + max(min(recent) - MARGIN_S, 0.0) if recent else began_s


def _class(size: tuple[bool, int]) -> tuple[bool, int]:
    has_prompts, num_tokens = size
    return has_prompts, num_tokens // TOKENS_PER_CLASS
