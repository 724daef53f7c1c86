"""The token budget of a step: how much of a prompt may run beside sequences that decode. Pure.

Each token of a step delays every sequence that decodes in it, and each step that a prompt waits delays its first token.
So a step with decodes takes `mixed` prompt tokens, and more where many wait (`prompt_tokens`), as far as the largest
step allows. The whole is rounded up to a size for which there is a graph, so that padding becomes tokens.

Made by `build`, asked by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.pod.step_tokens import prompt_tokens


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
        wanted = num_decodes + int(prompt_tokens(self.mixed, backlog))
        place = bisect_left(self.sizes, wanted)
        return min(self.sizes[place] if place < len(self.sizes) else wanted, self.most)
