"""Streams that another engine carries on: the tokens in their chunks, and the request to go on behind them.

`stoker.pod.marked_streams` explains the exchange with a router.

Values and pure functions; called by `server` and `front`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stoker.engine.http.errors import ApiError, bad_request, from_validation
from stoker.engine.http.job import Emitted, Job
from stoker.engine.http.openai.body import Token, Tokens
from stoker.engine.http.openai.protocol import GenerationBody
from stoker.engine.http.update import Update
from stoker.pod.marked_streams import MARK

ResumablePath = Literal["/v1/completions", "/v1/chat/completions"]


class ResumedChoice(BaseModel):
    """What the client has of one choice."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    index: Annotated[int, Field(ge=0)]
    tokens: Tokens
    seed: int | None = None
    ended: bool = False
    """Whether its finish reason was sent."""
    end: Token | None = None
    """The end token behind `tokens`, which usage counts."""


class ResumeState(BaseModel):
    """What the client has of a stream."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: ResumablePath
    id: str
    created: int
    fingerprint: str | None
    """`system_fingerprint` of the stream; another model's tokens would not fit."""
    choices: Annotated[list[ResumedChoice], Field(min_length=1)]

    @model_validator(mode="after")
    def _once(self) -> ResumeState:
        if len({choice.index for choice in self.choices}) < len(self.choices):
            raise ValueError("choices: each index may come once")
        return self

    def emitted(self, job: int, n: int) -> tuple[Emitted, ...]:
        """The choices of one prompt that has `n`; empty if the client has nothing of any."""
        found = {choice.index - job * n: choice for choice in self.choices if choice.index // n == job}
        return tuple(_emitted(found.get(choice)) for choice in range(n)) if found else ()

    def seed(self, job: int, n: int) -> int | None:
        """The seed of a prompt's choices; None if the client has nothing of them."""
        seeds = (one.seed for one in self.choices if one.index // n == job and one.seed is not None)
        return next(seeds, None)


def _emitted(choice: ResumedChoice | None) -> Emitted:
    if choice is None:
        return Emitted()
    return Emitted(tuple(choice.tokens), begun=True, ended=choice.ended, end_token=choice.end)


def parse_resume(body: bytes) -> tuple[ResumeState, bytes]:
    """Split the body of `POST /streams/resume` into the state and the client's body.

    Raises:
        ApiError: 400, with the wrong field.
    """
    line, _, rest = body.partition(b"\n")
    try:
        return ResumeState.model_validate_json(line), rest
    except ValidationError as error:
        raise from_validation(error) from error


def begun_job(job: Job, number: int, state: ResumeState | None) -> Job:
    """The job behind what another engine has sent of it."""
    if state is None:
        return job
    n, seed = job.params.n, state.seed(number, job.params.n)
    params = job.params if seed is None else job.params.with_seed(seed)
    return replace(job, params=params, emitted=state.emitted(number, n))


def check_resumed(
    state: ResumeState | None, body: GenerationBody, jobs: Sequence[Job], fingerprint: str | None, vocab_size: int
) -> None:
    """Refuse to go on with another model's stream, another request's, or one that cannot go on.

    Raises:
        ApiError: 409 or 400.
    """
    if state is None:
        return
    if fingerprint != state.fingerprint:
        message = f"The stream was begun by the model {state.fingerprint}; this engine serves {fingerprint}."
        raise ApiError(409, message, param="fingerprint", code="other_model")
    if not body.stream:
        raise bad_request("resume: only streams can go on (stream=true)", "stream", "invalid_value")
    if not resumable(jobs):
        fields = "prompt_logprobs, echo with logprobs, max_tokens=0 or use_beam_search"
        raise bad_request(f"not supported yet: resume with {fields}", "echo", "not_resumable")
    num_choices, last = sum(job.params.n for job in jobs), max(choice.index for choice in state.choices)
    if last >= num_choices:
        message = f"choices: the request has {num_choices} choices, got index {last}"
        raise bad_request(message, "choices", "invalid_value")
    wrong = (token for choice in state.choices for token in choice.tokens if token >= vocab_size)
    if (token := next(wrong, None)) is not None:
        allowed = f"token ids from 0 to {vocab_size - 1} are allowed, got {token}"
        raise bad_request(f"choices.tokens: {allowed}", "choices.tokens", "invalid_value")


def resumable(jobs: Sequence[Job]) -> bool:
    """Whether a stream of these jobs can go on elsewhere: the prompt's log-probabilities are sent only once, and a
    search keeps nothing that it could go on from."""
    return all(not job.params.prompt_only and job.params.prompt_logprobs is None and job.beams is None for job in jobs)


class TokenMarks:
    """Marks the chunks of one stream."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._seeded: set[int] = set()
        self._unsent: dict[int, list[int]] = defaultdict(list)
        """Tokens of updates that had no chunk, by choice."""

    def mark(self, index: int, update: Update, chunks: Sequence[dict[str, Any]]) -> None:
        """Mark the last chunk of an update of the choice `index`."""
        self._unsent[index] += update.tokens
        if not chunks:
            return
        field: dict[str, Any] = {"tokens": self._unsent.pop(index)}
        if index not in self._seeded:
            self._seeded.add(index)
            field["seed"] = self._jobs[update.job].params.seed
        if update.end_token is not None:
            field["end"] = update.end_token
        chunks[-1][MARK] = field

    def mark_usage(self, chunk: dict[str, Any]) -> None:
        """Mark the last chunk of a stream, which has no choice."""
        chunk[MARK] = {}
