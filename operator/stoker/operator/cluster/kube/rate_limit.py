"""A token bucket: a rate in the long run, a burst after a rest, first come first served.

Owns its tokens; `connection` waits on it before each request. Time is passed in as a clock.
"""

from __future__ import annotations

from stoker.operator.domain.clock import Clock


class RateLimit:
    """A limit that one event loop uses."""

    def __init__(self, clock: Clock, *, per_second: float, burst: int) -> None:
        self.clock = clock
        self.per_second = per_second
        self.burst = burst
        self._tokens = float(burst)
        self._at = clock.monotonic()

    async def take(self) -> float:
        """Wait for a turn and return the seconds that it took.

        Tokens may go below zero: a later caller waits behind the earlier ones.
        """
        now = self.clock.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        self._tokens -= 1
        wait_s = max(0.0, -self._tokens / self.per_second)
        if wait_s:
            await self.clock.sleep(wait_s)
        return wait_s
