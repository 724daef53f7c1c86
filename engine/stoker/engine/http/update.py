"""An update: what comes out of a generation, piece by piece, and goes into an answer.

Made by `JobFollower`; read by the answers of `openai`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stoker.engine.execution.step import TokenLogprobs

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Update:
    """New text and tokens of one choice of one job."""

    job: int
    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Where each token begins, in characters of the choice's text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop text or token of the request that ended it."""
    end_token: int | None = None
    """The end or stop token behind `tokens`, which usage counts."""
    end_logprob: float | None = None
    """That of the end or stop token, where it is known."""

    def by_token(self, shown: int) -> Iterator[Update]:
        """Yield it as updates of one token each, as they come where none waits for a front.

        `shown`: characters of the choice's text before it. Text that was held back comes with the token that frees it.
        """
        last, begin = max(len(self.tokens) - 1, 0), 0
        for place in range(last):
            end = max(min(self.offsets[place + 1] - shown, len(self.text)), begin)
            part = replace(self._tokens(place, place + 1), text=self.text[begin:end])
            yield replace(part, finish=None, stop_reason=None, end_token=None, end_logprob=None)
            begin = end
        yield replace(self._tokens(last, last + 1), text=self.text[begin:])

    def _tokens(self, first: int, end: int) -> Update:
        """The update with these of its tokens."""
        return replace(
            self,
            tokens=self.tokens[first:end],
            offsets=self.offsets[first:end],
            logprobs=self.logprobs[first:end] if self.logprobs is not None else None,
        )

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens that were generated: `tokens` and the end or stop token."""
        return self.tokens if self.end_token is None else (*self.tokens, self.end_token)
