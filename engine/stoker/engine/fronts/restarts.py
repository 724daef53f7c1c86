"""The bound on restarts of fronts: one that keeps ending ends the engine, instead of being started for ever.

Pure. Asked by `pool`.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 60.0
DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Wait before each restart within the window; there are no more of them."""


class RestartBudget:
    """Restarts of all fronts of one engine."""

    def __init__(self, delays_s: Sequence[float] = DELAYS_S) -> None:
        self._delays_s = tuple(delays_s)
        self._at_s: list[float] = []

    def take(self, now_s: float) -> float | None:
        """Seconds to wait before a restart; None when there were too many within the window."""
        self._at_s = [at_s for at_s in self._at_s if now_s - at_s < WINDOW_S]
        if len(self._at_s) >= len(self._delays_s):
            return None
        self._at_s.append(now_s)
        return self._delays_s[len(self._at_s) - 1]
