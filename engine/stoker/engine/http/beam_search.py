"""Beam search: the most probable whole outputs, found by keeping the best beginnings of each length.

Pure: scores of next tokens come in, beginnings and outputs go out. `beam_run` asks the core for the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.sampling import MAX_SCORED

MAX_WIDTH = MAX_SCORED // 2
"""A step scores twice as many tokens as there are beams, so that enough are left where some end their beam."""
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class BeamSettings:
    """How one prompt is searched."""

    width: int
    """Beginnings that are kept."""
    length_penalty: float
    """Outputs compare by their log-probability divided by their length to this power: above 0 favours long ones."""
    end_tokens: frozenset[int]
    """Tokens that end an output; empty to go on to the limit."""


@dataclass(frozen=True)
class Beam:
    """An output, or the beginning of one."""

    tokens: tuple[int, ...] = ()
    """Without the end token."""
    scores: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`."""
    total: float = 0.0
    """Log-probability of the whole, with the end token's."""
    end_token: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + (self.end_token is not None)

    def extended(self, token: int, logprob: float, score: TokenLogprobs, ends: bool) -> Beam:
        """The beam with one more token."""
        if ends:
            return Beam(self.tokens, self.scores, self.total + logprob, token)
        scores = (*self.scores, TokenLogprobs(logprob, score.top, _place(token, score)))
        return Beam((*self.tokens, token), scores, self.total + logprob)


def _place(token: int, score: TokenLogprobs) -> int:
    return next(place for place, (other, _) in enumerate(score.top, 1) if other == token)


class BeamSearch:
    """The search for one prompt's outputs of at most `max_tokens` tokens."""

    def __init__(self, settings: BeamSettings, max_tokens: int) -> None:
        self.settings, self.max_tokens = settings, max_tokens
        self.running = [Beam()]
        """Beginnings that the next step extends, best first."""
        self.ended: list[Beam] = []
        """The best whole outputs, best first."""

    def step(self, scores: Sequence[TokenLogprobs]) -> None:
        """Extend each running beam by its most probable next tokens; `scores` are those behind each of them."""
        made = [
            beam.extended(token, logprob, score, token in self.settings.end_tokens)
            for beam, score in zip(self.running, scores, strict=True)
            for token, logprob in score.top[: 2 * self.settings.width]
            if math.isfinite(logprob)
        ]
        whole = [beam for beam in made if beam.end_token is not None or beam.num_tokens == self.max_tokens]
        self.ended = self._best([*self.ended, *whole])
        going = [beam for beam in made if beam.end_token is None and beam.num_tokens < self.max_tokens]
        self.running = [] if self._cannot_improve(going) else self._best(going)

    @property
    def done(self) -> bool:
        return not self.running

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -self._value(beam.total, beam.num_tokens))[: self.settings.width]

    def _value(self, total: float, num_tokens: int) -> float:
        """What outputs compare by."""
        return float(total / num_tokens**self.settings.length_penalty)

    def _cannot_improve(self, going: list[Beam]) -> bool:
        """Whether no output of these beginnings can come among the best: more tokens never add to the total."""
        if len(self.ended) < self.settings.width or not going:
            return not going
        length = self.max_tokens if self.settings.length_penalty > 0 else going[0].num_tokens + 1
        return self._value(max(beam.total for beam in going), length) <= self._value(
            self.ended[-1].total, self.ended[-1].num_tokens
        )
