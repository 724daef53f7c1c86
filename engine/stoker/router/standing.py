"""What stands before a new request at one engine, and how fast the engine is, in the view of one router.

Joins the engine's report, while it is young, with this router's own requests, which count at once. `Measured` has the
formulas. `Standing` has their parts that do not depend on the request, so that a decision over many engines computes
only the rest; a `Backend` keeps it until one of its causes changes.

Pure; read by the policies and by admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stoker.pod.prompt_order import PromptQueue, tokens_before
from stoker.router.load import Load
from stoker.router.snapshot import Role

TOKENS_PER_S = 5000.0
"""Prefill rate of a backend while none has been measured."""
GAP_S = 0.02
"""Gap between two tokens while none has been measured."""
STREAM_WEIGHT = 0.05
"""What a second of prefill costs each sequence that decodes beside it, in seconds of a first token: half of its rate,
and a late token of a running answer counts a tenth of a late first one."""
AGAINST_ROLE_S = 2.0
"""Seconds that must be saved before an engine works against its pool's role."""
MUCH_MORE = 2
"""An engine that reports so many times the tokens of a router's own requests has others, too."""


class Known(Protocol):
    """What a router knows of an engine."""

    @property
    def role(self) -> Role:
        """The role that it prefers now."""
        ...

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...

    @property
    def unstarted(self) -> Sequence[int]:
        """Prompt tokens of this router's requests without a first byte that it computes, in the order of dispatch."""
        ...

    @property
    def load(self) -> Load | None:
        """The engine's newest report, while it is young; None without one."""
        ...


class Measured(NamedTuple):
    """One engine's state and rates in one decision."""

    prompts: Sequence[int]
    """Tokens of prompts that wait, in the order of arrival."""
    pending: int
    decoding: int
    rate: float
    """Prompt tokens per second."""
    gap_s: float
    step: int = 0
    """Prompt tokens of its next steps; 0: not known."""

    def queue(self, uncached: int) -> int:
        """Predict the tokens of other prompts that are computed before one with `uncached` tokens to compute."""
        return tokens_before(self.prompts, uncached, self.step)

    def prefill_s(self, uncached: int) -> float:
        """Predict the time to the first token of a prompt with `uncached` tokens to compute, disturbance included."""
        own = uncached / self.rate if uncached > 0 else 0.0
        return self.queue(uncached) / self.rate + own * (1 + self.decoding * STREAM_WEIGHT)


def measured(place: Known, load: Load | None, default_rate: float = TOKENS_PER_S) -> Measured:
    """Join an engine's report with this router's own requests.

    The router's own estimates leave out what is cached, so they are better where an engine has not much more.
    """
    prompts, pending, rate, gap, decoding, step = place.unstarted, place.pending, default_rate, GAP_S, 0, 0
    if load is not None:
        if load.waiting > len(prompts) or load.waiting_tokens > MUCH_MORE * sum(prompts):
            prompts = load.waiting_prompts
        pending = load.requests if load.requests > pending else pending
        rate, gap, decoding = load.prefill_tokens_per_s or rate, load.gap_s or gap, load.decoding
        step = load.step_of(sum(prompts))
    return Measured(prompts, pending, decoding, rate, gap, step)


class Standing(NamedTuple):
    """The parts of an engine's costs that are the same for every request, until its load or role changes."""

    queue: PromptQueue
    tokens: int
    """Of all prompts that wait."""
    most_passing: int
    """A prompt with more tokens to compute passes none of them."""
    rate: float | None
    """Prompt tokens per second; None: not measured, or without a young report."""
    share: float
    """What a token to compute costs, with its disturbance of what decodes."""
    answering_s: float
    """The cost of the rest of a request after its prompt."""
    helping_s: float
    """The price of computing a prompt for another engine."""


def standing_of(place: Known) -> Standing:
    """Compute an engine's standing from what is known of it now."""
    load, role = place.load, place.role
    prompts, pending, decoding, rate, gap_s, step = measured(place, load)
    queue = PromptQueue(prompts, step)
    answering_s = pending * gap_s + (AGAINST_ROLE_S if role == "prefill" else 0.0)
    return Standing(
        queue, queue.tokens, queue.most_passing, rate if load is not None and load.prefill_tokens_per_s else None,
        1.0 + decoding * STREAM_WEIGHT, answering_s, AGAINST_ROLE_S if role == "decode" else 0.0,
    )  # fmt: skip
