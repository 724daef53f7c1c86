"""A request and its sequences: parameters, computed tokens, end. No torch, no blocks, no rank.

The scheduler moves a sequence between states; the engine appends the tokens that a step gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stoker.engine.core.messages import FinishReason, RequestFacts, RequestProgress, RequestState
from stoker.engine.core.token_constraint import TokenConstraint
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.fingerprint import salt_digest


class State(Enum):
    """State of a sequence. A finished one never changes."""

    WAITING = "waiting"
    """Holds no blocks. A preempted sequence waits, too, and keeps its output."""
    RUNNING = "running"
    """Holds a seat and blocks."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ERROR = "error"
    ABORTED = "abort"

    @property
    def finished(self) -> bool:
        return self not in (State.WAITING, State.RUNNING)


_ENDS: dict[FinishReason, State] = {
    "stop": State.FINISHED_STOPPED,
    "length": State.FINISHED_LENGTH,
    "error": State.FINISHED_ERROR,
    "abort": State.ABORTED,
}

AGED = (-1, 0)
"""`Request.standing` of one that has waited too long."""

RequestKey = tuple[str, str]
"""(front, request id): request ids belong to the front that chose them."""


@dataclass(frozen=True)
class Begun:
    """What is known of a request that another engine began and this one accepted."""

    scheduled_s: float | None
    cached_tokens: int
    first_token_s: tuple[float | None, ...] = ()
    """Of each choice."""
    held_tokens: int = 0
    """Leading tokens of the prompt whose blocks this engine's cache holds."""


@dataclass(eq=False)
class Request:
    """One prompt and its `params.n` choices. Choice 0 computes the prompt; then the others fork off it.

    The choices of a resumed request have tokens of their own, so each begins by itself.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    params: SamplingParams
    """With a seed."""
    max_tokens: int
    """Largest number of output tokens of a choice, within the model's length."""
    stop_tokens: frozenset[int]
    """Tokens that end a choice: the model's end tokens (unless ignored) and the request's own."""
    arrival: int
    """Position in the order of arrival, which decides among equal priorities."""
    arrival_s: float
    priority: int = 0
    """A lower number is served first, within a class."""
    place: int = 0
    """The number of its class; a lower one is served first."""
    constraint: TokenConstraint | None = None
    """The tokens that may be chosen, before the first one; each sequence follows a copy."""
    resumed: tuple[tuple[int, ...] | None, ...] = ()
    """`AddRequest.resumed`."""
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that the first admission found in the prefix cache."""
    held_tokens: int = 0
    """`Begun.held_tokens`: while it waits they count as computed."""
    scheduled_s: float | None = None
    standing: tuple[int, int] = field(init=False)
    """Order of service before the arrival: place and priority, or `AGED`."""
    salt: bytes = field(init=False)
    """Of the keys of its blocks."""

    def __post_init__(self) -> None:
        self.salt = salt_digest(self.params.cache_salt)
        self.standing = (self.place, self.priority)
        if not self.resumed:
            self.sequences.append(Sequence(self, 0))
        for choice, tokens in enumerate(self.resumed):
            sequence = Sequence(self, choice)
            self.sequences.append(sequence)
            if tokens is None:
                sequence.end("stop")
            else:
                sequence.follow(tokens)

    def begin(self, begun: Begun) -> None:
        """Note what another engine has done of it already."""
        self.scheduled_s, self.cached_tokens, self.held_tokens = (
            begun.scheduled_s,
            begun.cached_tokens,
            begun.held_tokens,
        )
        for sequence, first_s in zip(self.sequences, begun.first_token_s, strict=False):
            sequence.first_token_s = first_s

    def age(self) -> None:
        """Put it before all classes. The caller orders its sequences anew."""
        self.standing = AGED
        for sequence in self.sequences:
            sequence.rank = (*AGED, self.arrival, sequence.choice)

    @property
    def first_choice(self) -> int:
        """The choice whose first token shows that the prompt is computed."""
        return next((choice for choice, tokens in enumerate(self.resumed) if tokens is not None), 0)

    @property
    def finished(self) -> bool:
        return all(sequence.state.finished for sequence in self.sequences)

    @property
    def progress(self) -> RequestProgress:
        """How far it is: as far as its furthest choice."""
        open_ones = [sequence for sequence in self.sequences if not sequence.state.finished]
        running = [sequence for sequence in open_ones if sequence.state is State.RUNNING]
        preemptions = sum(sequence.preemptions for sequence in self.sequences)
        state: RequestState
        if running:
            decodes = any(one.first_token_s is not None and one.missing <= 1 for one in running)
            state = "DECODING" if decodes else "PREFILLING"
        else:
            state = "PREEMPTED" if any(one.preemptions for one in open_ones) else "QUEUED"
        return RequestProgress(self.key[1], state, self.cached_tokens, preemptions)

    def fork(self) -> list[Sequence]:
        """Create choices 1 to n-1, when the prompt of choice 0 is about to be complete."""
        forks = [Sequence(self, choice) for choice in range(1, self.params.n)]
        self.sequences.extend(forks)
        return forks


class Sequence:
    """One choice: its tokens, and the number of them in the cache."""

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.max_length = self.num_prompt + request.max_tokens
        """Prompt and output tokens at most."""
        self.num_pending = 0
        """Tokens that submitted steps will sample. They have positions, but no known ids yet."""
        self.num_computed = 0
        """Tokens whose keys and values are in this sequence's blocks once all submitted steps are done."""
        self.capacity = 0
        """Tokens that fit the blocks it owns alone; 0 when that must be looked up again."""
        self.state = State.WAITING
        self.seat: int | None = None
        """Row of the runner's per-sequence tensors, while RUNNING."""
        self.stop_token: int | None = None
        self.error: str | None = None
        self.last_step = -1
        """The last step that samples for it, in the scheduler's count."""
        self.preemptions = 0
        self.constraint = request.constraint and request.constraint.copy()
        self.waits = self.constraint is not None and self.constraint.needs_tokens
        """Whether its next token can be sampled only when those before are known on the host."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.rank = (*request.standing, request.arrival, choice)
        """Order of service; smaller ranks come first."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def missing(self) -> int:
        """Tokens that the next step can compute; 0 while its last token is being sampled, or must be known first."""
        if self.num_pending and self.waits:
            return 0
        length = len(self.tokens) + self.num_pending
        return length - self.num_computed if length < self.max_length else 0

    @property
    def decodes(self) -> bool:
        """Whether its prompt is computed, or its last part is about to be."""
        return self.num_pending > 0 or len(self.tokens) - self.num_computed == 1

    @property
    def num_seats(self) -> int:
        """Seats it needs at its start, with those of choices that will fork off it."""
        return self.request.params.n if len(self.request.sequences) < self.request.params.n else 1

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's log-probabilities are requested and not complete."""
        return self.request.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def follow(self, tokens: tuple[int, ...]) -> None:
        """Begin behind output tokens that another engine sampled."""
        self.tokens += tokens
        if self.constraint is not None:
            for token in tokens:
                self.constraint.accept(token)

    def append(self, token: int, now_s: float) -> FinishReason | None:
        """Append one sampled token. Returns the reason if it ends the sequence."""
        if self.num_pending:
            self.num_pending -= 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if self.request.params.prompt_only:
            return "length"
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            self.stop_token = token
            return "stop"
        if self.constraint is not None and self.constraint.accept(token):
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def end(self, reason: FinishReason) -> None:
        assert not self.state.finished, "a finished sequence never changes"
        self.state = _ENDS[reason]

    def facts(self, now_s: float) -> RequestFacts:
        request = self.request
        return RequestFacts(
            prompt_tokens=self.num_prompt,
            cached_tokens=request.cached_tokens,
            output_tokens=self.num_output,
            preemptions=self.preemptions,
            arrival_s=request.arrival_s,
            scheduled_s=request.scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            finished_s=now_s,
        )
