"""Whether something that fails is tried again: after a failure not for a second, then two, up to a minute. Pure."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 60.0


class Breaker:
    """Closed after failures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.reason = ""
        """The last failure; empty after a success."""
        self._pause_s = 0.0
        self._until_s = 0.0

    @property
    def open(self) -> bool:
        """Whether a try is allowed now."""
        return not self._pause_s or self.clock() >= self._until_s

    def failed(self, reason: str) -> None:
        if self._pause_s and not self.open:
            return  # begun before the pause
        self._pause_s = min(max(2 * self._pause_s, FIRST_S), LONGEST_S)
        self._until_s = self.clock() + self._pause_s
        self.reason = reason

    def worked(self) -> None:
        if self.open:
            self._pause_s, self.reason = 0.0, ""
