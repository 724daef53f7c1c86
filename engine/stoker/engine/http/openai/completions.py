"""`POST /v1/completions`: the answer's shape, whole and in chunks.

Pure; called by `front`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.generation import Generation
from stoker.engine.http.job import Job
from stoker.engine.http.openai.answer import Envelope, UsageChunks
from stoker.engine.http.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from stoker.engine.http.openai.resume import TokenMarks
from stoker.engine.http.update import Update

KIND = "text_completion"


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that is repeated before its continuation."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass
class _Choice:
    """The text and tokens of one choice so far."""

    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    output_scores: list[float] = field(default_factory=list)
    """Log-probabilities of the output tokens and the end token, where they are known.

    `scores` has those of an echoed prompt, too, and none of an end token.
    """
    prompt_scores: list[dict[str, dict[str, Any]] | None] | None = None
    ids: list[int] = field(default_factory=list)
    """Output tokens with the end token."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's tokens; in a stream only with the first part."""

    @property
    def mean(self) -> float:
        """Mean log-probability of a generated token: what `best_of` compares. Any output is better than none."""
        return sum(self.output_scores) / len(self.output_scores) if self.output_scores else -math.inf


@dataclass(frozen=True)
class CompletionFields:
    """Fields of a request that decide the answer's shape."""

    n: int
    """Answers to return for each prompt."""
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool = False


class CompletionAnswer:
    """Choice `i` of prompt `p` has index `p * n + i`."""

    def __init__(
        self,
        envelope: Envelope,
        generation: Generation,
        names: TokenNames,
        usage_chunks: UsageChunks,
        echoes: list[EchoedPrompt] | None,
        fields: CompletionFields,
    ) -> None:
        self._envelope = envelope
        self.generation = generation
        self._names = names
        self._usage_chunks = usage_chunks
        self._echoes = echoes
        self._n = generation.jobs[0].params.n
        """Answers that are made for each prompt."""
        self._fields = fields
        self._with_logprobs = fields.logprobs is not None
        self.marks: TokenMarks | None = None
        """Marks the chunks of a stream that another engine could carry on."""
        self._begun = {
            number * self._n + choice
            for number, job in enumerate(generation.jobs)
            for choice, emitted in enumerate(job.emitted)
            if emitted.begun
        }
        self._prompt_scores: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    @property
    def jobs(self) -> Sequence[Job]:
        """The prompts and how to continue them."""
        return self.generation.jobs

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one object."""
        choices = [_Choice() for _ in range(self._n * len(self.generation.jobs))]
        async with aclosing(self.generation.updates()) as updates:
            async for update in updates:
                choice = choices[self._index(update)]
                choice.output_scores += (score.logprob for score in update.logprobs or ())
                if update.end_logprob is not None:
                    choice.output_scores.append(update.end_logprob)
                for part in self._parts(update):
                    _add(choice, part)
        bodies = [self._choice(index, choice) for index, choice in enumerate(self._best(choices))]
        return self._envelope.wrap(KIND, bodies, usage=self._usage_chunks.usage(self.generation))

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the answer as it arrives. Every chunk with a choice has `text`."""
        async with aclosing(self.generation.updates()) as updates:
            async for update in updates:
                chunks = [self._chunk(update, part) for part in self._parts(update) if self._is_shown(part)]
                if self.marks is not None:
                    self.marks.mark(self._index(update), update, chunks)
                for chunk in chunks:
                    yield chunk
        if self._usage_chunks.last:
            last = self._envelope.wrap(KIND, [], usage=self._usage_chunks.usage(self.generation))
            if self.marks is not None:
                self.marks.mark_usage(last)
            yield last

    def _is_shown(self, part: _Choice) -> bool:
        """Whether a part of a choice is worth a chunk."""
        listed = (part.tokens and self._with_logprobs) or (part.ids and self._fields.token_ids)
        return bool(part.text or listed or part.finish)

    def _chunk(self, update: Update, part: _Choice) -> dict[str, Any]:
        choice = self._choice(self._index(update), part)
        return self._envelope.wrap(KIND, [choice], **self._usage_chunks.field(self.generation))

    def _best(self, choices: list[_Choice]) -> list[_Choice]:
        """The choices to return, of each prompt those with the highest mean log-probability first."""
        for index, choice in enumerate(choices):
            choice.prompt_scores = self._prompt_logprobs(index // self._n)
        if self._fields.n == self._n:
            return choices
        of_prompts = (choices[first : first + self._n] for first in range(0, len(choices), self._n))
        ranked = (sorted(own, key=lambda choice: -choice.mean) for own in of_prompts)
        return [choice for own in ranked for choice in own[: self._fields.n]]

    def _prompt_logprobs(self, job: int) -> list[dict[str, dict[str, Any]] | None] | None:
        if self._fields.prompt_logprobs is None:
            return None
        tokens = self.generation.jobs[job].prompt_tokens
        return prompt_logprobs(self._names, tokens, self._prompt_scores[job], self._fields.prompt_logprobs)

    def _index(self, update: Update) -> int:
        return update.job * self._n + update.choice

    def _parts(self, update: Update) -> list[_Choice]:
        """Return the update's part of its choice, after the echoed prompt if it is the first."""
        parts = []
        index = self._index(update)
        if update.prompt_logprobs is not None:
            self._prompt_scores[update.job] = update.prompt_logprobs
        if self._echoes is not None and index not in self._begun:
            parts.append(self._echo(update.job))
        begins = index not in self._begun
        self._begun.add(index)
        base = len(self._echoes[update.job].text) if self._echoes is not None else 0
        scores = list(update.logprobs or ())
        parts.append(
            _Choice(
                update.text,
                update.finish,
                update.stop_reason,
                list(update.tokens),
                [base + offset for offset in update.offsets],
                [*scores],
                ids=list(update.all_tokens),
            )
        )
        parts[0].prompt_ids = self.generation.jobs[update.job].prompt_tokens if begins else None
        return parts

    def _echo(self, job: int) -> _Choice:
        assert self._echoes is not None
        echo = self._echoes[job]
        scores = self._prompt_scores.get(job, (None,) * len(echo.tokens))
        shown = self._fields.logprobs or 0
        scores = tuple(None if score is None else replace(score, top=score.top[:shown]) for score in scores)
        return _Choice(echo.text, None, None, list(echo.tokens), list(echo.offsets), list(scores))

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            logprobs = completion_logprobs(self._names, choice.tokens, choice.offsets, choice.scores)
        body = {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if choice.prompt_scores is not None:
            body["prompt_logprobs"] = choice.prompt_scores
        if self._fields.token_ids:
            body |= {"token_ids": choice.ids, "prompt_token_ids": choice.prompt_ids}
        return body


def _add(choice: _Choice, part: _Choice) -> None:
    choice.text += part.text
    choice.finish = part.finish or choice.finish
    choice.stop_reason = part.stop_reason if part.stop_reason is not None else choice.stop_reason
    choice.tokens += part.tokens
    choice.offsets += part.offsets
    choice.scores += part.scores
    choice.ids += part.ids
    choice.prompt_ids = choice.prompt_ids or part.prompt_ids
