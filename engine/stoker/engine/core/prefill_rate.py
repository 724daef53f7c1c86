"""The rate at which an engine computes prompts, while any is in work.

Prompts are in work side by side: short ones pass a long one, which keeps half of each step. The time of each prompt
alone would tell about half of what the engine does, and less the more it has to do. So each moment counts once, and
tokens and seconds are summed up before they are divided.

Owned by `JobLedger`; routers predict first tokens by it for admission. Fronts of one engine tell each other their last
prompts, from which each has the rate of all: a mean of their rates would leave out what ran beside the prompts of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

KEPT = 0.95
"""What the sums keep of themselves at each prompt: about the last twenty count."""
FEWEST_TOKENS = 16
"""Prompt tokens from which the time of a prompt says something: a step has a price of its own."""
MOST_SPANS = 64
"""Spans of time that are remembered as counted; those of prompts in work together are one."""
MOST_RECENT = 64
"""Prompts that tell the rate: of the sums those before them are a twenty-fifth."""


class Prefill(NamedTuple):
    """Tokens of a prompt that were computed, and when; on a clock that the processes of a machine share."""

    tokens: int
    begin_s: float
    end_s: float


class PrefillRate:
    """Tokens and seconds of the last prompts."""

    def __init__(self) -> None:
        self.recent: deque[Prefill] = deque(maxlen=MOST_RECENT)
        self._tokens = self._seconds = 0.0
        self._counted: list[tuple[float, float]] = []
        """Spans (begin, end) apart from each other, the newest last."""

    def computed(self, tokens: int, begin_s: float, end_s: float) -> None:
        """Note that so many tokens of a prompt, which was in work from `begin_s`, have been computed at `end_s`."""
        if tokens < FEWEST_TOKENS or end_s <= begin_s:
            return
        self.recent.append(Prefill(tokens, begin_s, end_s))
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + self._uncounted_s(begin_s, end_s)

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first prompt."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def _uncounted_s(self, begin_s: float, end_s: float) -> float:
        """Count a span; return the seconds of it that had not been counted."""
        met = [span for span in self._counted if span[0] <= end_s and span[1] >= begin_s]
        seconds = end_s - begin_s - sum(min(end, end_s) - max(begin, begin_s) for begin, end in met)
        whole = min([begin_s, *(begin for begin, _ in met)]), max([end_s, *(end for _, end in met)])
        self._counted = [*(span for span in self._counted if span not in met), whole][-MOST_SPANS:]
        return max(seconds, 0.0)


def newest(prefills: Iterable[Prefill]) -> tuple[Prefill, ...]:
    """The last of several fronts' prompts, in the order of their ends."""
    return tuple(sorted(prefills, key=lambda one: (one.end_s, one))[-MOST_RECENT:])


def rate_of(prefills: Iterable[Prefill]) -> float | None:
    """The rate at which these prompts were computed, given in the order of their ends; None without any."""
    rate = PrefillRate()
    for one in prefills:
        rate.computed(*one)
    return rate.tokens_per_s
