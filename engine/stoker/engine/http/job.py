"""A job: one prompt and how to continue it, with what another engine has sent of it and the tokens that it took.

Made by `front`; `Generation` and `JobFollower` count its usage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.engine.core.messages import RequestFacts
from stoker.engine.http.beam_search import BeamSettings
from stoker.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Emitted:
    """What another engine has sent of one choice."""

    tokens: tuple[int, ...] = ()
    begun: bool = False
    """Whether anything was sent."""
    ended: bool = False
    """Whether its finish reason was sent."""
    end_token: int | None = None
    """The end token behind `tokens`."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens, as `usage` counts them."""
        return len(self.tokens) + (self.end_token is not None)


@dataclass(frozen=True)
class Job:
    """One prompt and how to continue it."""

    id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    """Monotonic; before tokenising."""
    priority: int = 0
    continues: bool = False
    """The text goes on where the prompt's ends; else it is a text of its own."""
    emitted: tuple[Emitted, ...] = ()
    """For each choice what another engine has sent; empty for a new job."""
    beams: BeamSettings | None = None
    """Search for the most probable outputs instead of sampling."""


@dataclass
class Usage:
    """Tokens of one job so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    facts: dict[int, RequestFacts] = field(default_factory=dict)
    """Counts and times of each choice that has begun, final ones of those that have ended."""
