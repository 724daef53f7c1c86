"""Tokens per second over the last seconds, from counters that only grow. Pure; owned by the engine."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
SPACING_S = 0.5
"""Counts closer to each other than this are not kept, so that the window holds few of them."""


class TokenCounts(NamedTuple):
    """Counters at one time."""

    time_s: float
    prompt: int
    generation: int


class TokenRate:
    """The rates of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._counts: deque[TokenCounts] = deque()

    def record(self, now: TokenCounts) -> tuple[float, float]:
        """Record the counters; return prompt and output tokens per second since the oldest ones of the window."""
        while len(self._counts) > 1 and self._counts[1].time_s <= now.time_s - WINDOW_S:
            self._counts.popleft()
        if not self._counts or now.time_s - self._counts[-1].time_s >= SPACING_S:
            self._counts.append(now)
        oldest = self._counts[0]
        seconds = max(now.time_s - oldest.time_s, SPACING_S)
        return (now.prompt - oldest.prompt) / seconds, (now.generation - oldest.generation) / seconds
