"""An update: what comes out of a generation, piece by piece, and goes into an answer.

Made by `JobFollower`; read by the answers of `openai`.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens that were generated: `tokens` and the end or stop token."""
        return self.tokens if self.end_token is None else (*self.tokens, self.end_token)
