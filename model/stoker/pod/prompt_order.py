"""How many prompt tokens an engine computes before a new prompt, where short prompts pass long ones. Pure.

The engine's scheduler decides by these constants (`short_prompts`), and routers predict by `PromptQueue`: the first
prompt in work leaves half of each step to those that have at most a `MUCH`th of its tokens, the shortest first. The
prediction is within two steps of the scheduler, but in queues where the rest of a step decides which prompt passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate

MUCH = 2
"""A prompt goes first where the long one has so many times as many tokens to compute."""
LOOK_AHEAD = 64
"""Waiting prompts among which short ones are looked for."""


def tokens_before(prompts: Sequence[int], own: int, step: int = 0) -> int:
    """Predict the tokens of others that are computed before the end of a prompt of `own` tokens.

    Args:
        prompts: tokens that those before it still need, in the order of arrival.
        step: prompt tokens of a full step: none passes a prompt that ends in it. 0: endlessly small.
    """
    own = max(own, 1)
    longest = max(prompts, default=0)
    if longest <= step or MUCH * own > longest:
        return sum(prompts)  # it passes none, and all others end before it
    order = _Order((*prompts, own), step)
    while not order.ended(len(prompts)):
        order.end_next()
    return order.computed - own


class PromptQueue:
    """The prompts that wait at one engine, summed up and sorted for many predictions."""

    def __init__(self, prompts: Sequence[int], step: int = 0) -> None:
        """Take the arguments of `tokens_before`; `prompts` does not change."""
        self.prompts, self.step = prompts, step
        self.tokens = sum(prompts)
        longest = max(prompts) if prompts else 0
        self.most_passing = longest // MUCH if longest > step else 0
        """A prompt of more tokens passes none."""

    def before(self, own: int) -> int:
        """Predict as `tokens_before`, its slow twin."""
        own = own if own > 1 else 1
        if own > self.most_passing:
            return self.tokens
        if len(self.prompts) > LOOK_AHEAD:
            return tokens_before(self.prompts, own, self.step)
        lengths, sums, places = self._behind
        number = bisect_right(lengths, own)
        shorter, head = sums[number], self.prompts[0]
        if shorter + MUCH * own <= head and head - shorter > self.step:
            return own + 2 * shorter  # all of these pass the first one, which has half of each step
        return self._in_turn(own, list(zip(lengths[:number], places, strict=False)))

    def _in_turn(self, own: int, shorter: Sequence[tuple[int, int]]) -> int:
        """Let one after the other end: the shortest that passes the first, or else the first itself."""
        prompts, step, first, computed, ended = self.prompts, self.step, 0, 0, set[int]()
        left, following = prompts[0], iter((*shorter, (own, len(prompts))))
        tokens, place = next(following)
        while first < len(prompts):
            if place in ended or place <= first:
                tokens, place = next(following)
            elif left > step and MUCH * tokens <= left:
                left, computed = left - tokens, computed + 2 * tokens
                if place == len(prompts):
                    return computed - own
                ended.add(place)
                tokens, place = next(following)
            else:
                computed, first = computed + left, first + 1
                while first in ended:
                    first += 1
                left = prompts[first] if first < len(prompts) else 0
                rest = min(-computed % step, left) if step else 0
                left, computed = left - rest, computed + rest
        return self.tokens

    @cached_property
    def _behind(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The prompts behind the first, the shortest first: their lengths, sums of the first 0, 1, 2, ..., places."""
        prompts = self.prompts
        places = sorted(range(1, len(prompts)), key=prompts.__getitem__)
        lengths = [prompts[place] for place in places]
        return lengths, list(accumulate(lengths, initial=0)), places


class _Order:
    """Prompts while they are computed."""

    def __init__(self, left: Sequence[int], step: int) -> None:
        self.left, self.step = list(left), step
        self.first = 0
        """The first one that has not ended."""
        self.computed = 0
        self._ended = [False] * len(left)
        self._seen = min(len(left), LOOK_AHEAD + 1)
        self._behind = [(left[place], place) for place in range(1, self._seen)]
        """Those behind the first that may pass, with others that have become the first."""
        heapify(self._behind)

    def ended(self, place: int) -> bool:
        return self._ended[place]

    def end_next(self) -> None:
        """Let the next one end: the shortest that passes the first, or else the first itself."""
        while self._behind and self._behind[0][1] <= self.first:
            heappop(self._behind)
        left = self.left[self.first]
        if self._behind and left > self.step and MUCH * self._behind[0][0] <= left:
            tokens, place = heappop(self._behind)
            self.left[self.first] -= tokens
            self.computed += 2 * tokens
            self._ended[place] = True
        else:
            self._compute_first(left)
            self._end_first()
        if self._seen < len(self.left):
            heappush(self._behind, (self.left[self._seen], self._seen))
            self._seen += 1

    def _end_first(self) -> None:
        """Go on with the next one, which has the rest of the step alone."""
        self._ended[self.first] = True
        while self.first < len(self.left) - 1 and self._ended[self.first]:
            self.first += 1
        if self.step:
            self._compute_first(min(-self.computed % self.step, self.left[self.first]))

    def _compute_first(self, tokens: int) -> None:
        self.left[self.first] -= tokens
        self.computed += tokens
