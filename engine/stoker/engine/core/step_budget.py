"""The token budget of a step: how much of a prompt may run beside sequences that decode. Pure.

Each token of a step delays every sequence that decodes in it, and each step that a prompt waits delays its first token.
So a step with decodes takes `mixed` prompt tokens, and more where many wait: a backlog is worked off in `BACKLOG_STEPS`
steps, as far as the largest step allows. The whole is rounded up to a size for which there is a graph, so that padding
becomes tokens.

Made by `build`, asked by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

BACKLOG_STEPS = 6
"""Steps in which prompts that wait are to be computed."""


@dataclass(frozen=True)
class StepBudget:
    """Largest number of tokens of a step."""

    most: int
    """Of any step."""
    mixed: int | None = None
    """Prompt tokens beside decodes while few wait; None: as many as fit."""
    sizes: Sequence[int] = ()
    """Rising sizes of steps that have graphs."""

    def tokens(self, num_decodes: int, backlog: int) -> int:
        """Tokens of the next step. `backlog`: prompt tokens that wait. At least one of them fits beside the decodes
        wherever `most` is above `num_decodes`."""
        if self.mixed is None or not num_decodes or num_decodes >= self.most:
            return self.most
        wanted = num_decodes + max(self.mixed, -(-backlog // BACKLOG_STEPS))
        place = bisect_left(self.sizes, wanted)
        return min(self.sizes[place] if place < len(self.sizes) else wanted, self.most)
