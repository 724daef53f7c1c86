"""Random prompts of given lengths. Pure: the same seed makes the same prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.pod.token_lengths import TokenLengths

MOST_SPECIAL = 100
"""Token ids below it are often special ones; a vocabulary that is small gives up a tenth of it at most."""


@dataclass(frozen=True)
class Workload:
    """Requests of one round."""

    count: int
    own: TokenLengths
    """Tokens of a prompt behind the shared ones."""
    output: TokenLengths
    shared: int = 0
    """First tokens of every prompt."""
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may be drawn."""
        return self.shared + self.own.high + self.output.high

    def requests(self, number: int, vocabulary: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield prompts and output lengths of a round. Rounds share no prompt beyond the shared tokens."""
        lengths = random.Random(f"{self.seed}/lengths")  # the same in each round
        beginning = _ids(random.Random(f"{self.seed}/shared"), self.shared, vocabulary)
        rng = random.Random(f"{self.seed}/{number}")
        for _ in range(self.count):
            own, output = self.own.draw(lengths), self.output.draw(lengths)
            yield (*beginning, *_ids(rng, own, vocabulary)), output


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(min(MOST_SPECIAL, vocabulary // 10), vocabulary) for _ in range(count)]
