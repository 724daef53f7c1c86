"""The load of one engine as `/status` reports it: counters that only grow, for the operator's autoscaler.

A reader takes the difference of two reports, so it needs no agreement on windows and loses nothing between two polls.
Each front counts its own requests (`FrontMetrics`), and the core the prompts that it computes for other engines
(`PrefillDesk`); the program reports the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.engine.core.messages import ModelFacts, RequestFacts
from stoker.engine.core.stats import Stats
from stoker.pod.histogram import Histogram, merged

COUNTS = ("arrived", "first_tokens")
HISTOGRAMS = ("uncached", "prompt", "output", "first_token_s", "token_gap_s")


class LoadCounters:
    """Requests and their times since the start of a front or a core. Times in seconds, sizes in tokens."""

    def __init__(self) -> None:
        self.arrived = 0
        """Requests that went to the core, also those that its full queue refused."""
        self.first_tokens = 0
        self.uncached = Histogram()
        """Prompt tokens that were computed here: neither read from the prefix cache nor computed by another engine."""
        self.prompt = Histogram()
        self.output = Histogram()
        self.first_token_s = Histogram()
        self.token_gap_s = Histogram()

    def first_token(self, seconds: float) -> None:
        self.first_tokens += 1
        self.first_token_s.add(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        self.token_gap_s.add(seconds / count, count)

    def finished(self, facts: RequestFacts) -> None:
        """Count a choice that ended. One that never ran has no sizes worth knowing.

        One that ended at another engine, which helped, was not computed here. What was taken over found its blocks in
        the cache.
        """
        if facts.first_token_s is None:
            return
        self.prompt.add(facts.prompt_tokens)
        self.uncached.add(1 if facts.helped else max(facts.prompt_tokens - facts.cached_tokens, 1))
        self.output.add(facts.output_tokens)

    def add(self, other: LoadCounters) -> None:
        """Add the counts of another front or core."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in HISTOGRAMS:
            setattr(self, name, merged((getattr(self, name), getattr(other, name))))

    def to_wire(self) -> dict[str, Any]:
        """Plain values: every count by its name."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        return counts | {name: getattr(self, name).to_wire() for name in HISTOGRAMS}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> LoadCounters:
        """Read `to_wire`."""
        counters = cls()
        for name in COUNTS:
            setattr(counters, name, int(wire[name]))
        for name in HISTOGRAMS:
            setattr(counters, name, Histogram.from_wire(wire[name]))
        return counters

    def with_helped(self, stats: Stats) -> LoadCounters:
        """The sum with the prompts that the core computes for other engines."""
        found = LoadCounters()
        found.add(self)
        if stats.transfer is not None:
            found.add(LoadCounters.from_wire(stats.transfer.load))
        return found

    def report(
        self, stats: Stats | None, facts: ModelFacts | None, *, max_requests: int, max_batch_tokens: int
    ) -> Mapping[str, Any] | None:
        """The `load` field of `/status`; None while the core has not reported."""
        if stats is None or facts is None:
            return None
        return {
            **self.with_helped(stats).to_wire(),
            "generated": stats.generation_tokens,
            "steps": stats.steps,
            "step_tokens": stats.step_tokens_sum,
            "busy_s": round(stats.busy_s, 6),
            "running": stats.running,
            "waiting": stats.waiting,
            "owned_tokens": stats.owned_blocks * facts.block_size,
            "total_tokens": stats.total_blocks * facts.block_size,
            "max_requests": max_requests,
            "max_batch_tokens": max_batch_tokens,
            "mixed_tokens": facts.mixed_tokens,
        }
