"""How long a program asks again where nothing answers."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 300.0


class Patience:
    """The time since which there was no answer."""

    def __init__(self, longest_s: float = LONGEST_S, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._monotonic = longest_s, monotonic
        self._since: float | None = None

    def missed(self, error: Exception) -> bool:
        """Note that no answer came; True for the first time. Raises `error` when that lasts too long."""
        now = self._monotonic()
        if self._since is None:
            self._since = now
            return True
        if now - self._since >= self._longest_s:
            raise error
        return False

    def heard(self) -> bool:
        """Note an answer; True where some were missed before it."""
        since, self._since = self._since, None
        return since is not None
