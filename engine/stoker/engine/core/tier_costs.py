"""Seconds of a copy against seconds of computing again, from what was measured. Pure.

Asked by `host_tier`, told by it and by the engine.
"""

from __future__ import annotations

from stoker.engine.config import Preemption

RECENT = 0.2
"""Weight of the newest measurement."""


class Rate:
    """A moving average of units per second; None before the first measurement."""

    def __init__(self) -> None:
        self.value: float | None = None

    def record(self, units: float, seconds: float) -> None:
        rate = units / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + RECENT * (rate - self.value)

    def seconds(self, units: float) -> float | None:
        return None if self.value is None else units / self.value


class TierCosts:
    """Decides between moving and computing. Before both are measured it moves, to measure."""

    def __init__(self, preemption: Preemption = "auto") -> None:
        self.preemption = preemption
        self.writes, self.reads = Rate(), Rate()
        """Bytes per second to and from the tier."""
        self.fetched = Rate()
        """Bytes per second from the tiers below to the tier."""
        self.prefill = Rate()
        """Prompt tokens per second."""

    def swaps(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether a preempted sequence of so many tokens is saved, and not computed again."""
        if self.preemption != "auto":
            return self.preemption == "swap"
        computing = self.prefill.seconds(num_tokens)
        moving = [self.writes.seconds(num_bytes), self.reads.seconds(num_bytes)]
        return computing is None or None in moving or sum(part or 0.0 for part in moving) < computing

    def loads(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to load so many tokens, rather than to compute them. Also asked for what is left of a late load."""
        computing, moving = self.prefill.seconds(num_tokens), self.reads.seconds(num_bytes)
        return self.preemption == "swap" or computing is None or moving is None or moving < computing

    def fetches(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to bring so many tokens from a tier below into the tier and load them, rather than compute them."""
        computing, fetching = self.prefill.seconds(num_tokens), self.fetched.seconds(num_bytes)
        if self.preemption == "swap" or computing is None or fetching is None:
            return True
        return fetching + (self.reads.seconds(num_bytes) or 0.0) < computing
