"""`POST /v1/chat/completions`: the answer's shape, whole and in chunks.

Called by `front`. A choice's text goes through its parser, which takes out reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.generation import Generation
from stoker.engine.http.job import Job
from stoker.engine.http.openai.answer import Envelope, UsageChunks
from stoker.engine.http.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from stoker.engine.http.openai.parser_choice import AnswerParsers
from stoker.engine.http.openai.protocol import REASONING_FIELDS
from stoker.engine.http.openai.resume import TokenMarks
from stoker.engine.http.openai.tool_parser import OutputParser, Part
from stoker.engine.http.update import Update

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
ROLE = "assistant"


@dataclass
class _Call:
    id: str
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class _Choice:
    """One choice so far."""

    parser: OutputParser
    begun: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[_Call] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Output tokens with the end token; in a stream those that were not sent yet."""


class ChatAnswer:
    """One conversation, `n` answers to it."""

    def __init__(
        self,
        envelope: Envelope,
        generation: Generation,
        names: TokenNames,
        usage_chunks: UsageChunks,
        parsers: AnswerParsers,
        *,
        token_ids: bool = False,
    ) -> None:
        """`token_ids`: the answer has the token ids of prompt and output."""
        self._token_ids = token_ids
        self._envelope = envelope
        self.generation = generation
        self._names = names
        self._usage_chunks = usage_chunks
        self._parsers = parsers
        self._prompt_scores: Sequence[TokenLogprobs | None] | None = None
        self._with_logprobs = generation.jobs[0].params.logprobs is not None
        self._choices = [_Choice(parsers.parser()) for _ in range(generation.jobs[0].params.n)]
        self.marks: TokenMarks | None = None
        """Marks the chunks of a stream that another engine could carry on."""
        for (_, index), text in generation.shown.items():
            self._go_on(self._choices[index], text, begun=generation.jobs[0].emitted[index].begun)

    @property
    def jobs(self) -> Sequence[Job]:
        """The prompts and how to continue them."""
        return self.generation.jobs

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one object."""
        async with aclosing(self.generation.updates()) as updates:
            async for update in updates:
                choice = self._choices[update.choice]
                self._read(choice, update)
                self._prompt_scores = update.prompt_logprobs or self._prompt_scores
                choice.tokens += update.tokens
                choice.scores += update.logprobs or ()
        bodies = [self._message(index, choice) for index, choice in enumerate(self._choices)]
        more = {**self._scores(), **self._prompt_ids()}
        return self._envelope.wrap(KIND, bodies, usage=self._usage_chunks.usage(self.generation), **more)

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the answer as it arrives: a choice begins with its role, and its last chunk has the finish reason."""
        async with aclosing(self.generation.updates()) as updates:
            async for update in updates:
                choice = self._choices[update.choice]
                chunks = [] if choice.begun else [self._first_chunk(update.choice)]
                choice.begun = True
                chunks += self._update_chunks(choice, update)
                if self.marks is not None:
                    self.marks.mark(update.choice, update, chunks)
                for chunk in chunks:
                    yield chunk
        if self._usage_chunks.last:
            last = self._envelope.wrap(CHUNK_KIND, [], usage=self._usage_chunks.usage(self.generation))
            if self.marks is not None:
                self.marks.mark_usage(last)
            yield last

    def _go_on(self, choice: _Choice, text: str, *, begun: bool) -> None:
        """Bring a choice to where another engine left it."""
        choice.begun = begun
        for part in choice.parser.add(text) if text else ():
            self._delta(choice, part)

    def _prompt_ids(self) -> dict[str, Any]:
        """The field `prompt_token_ids`, if it was requested."""
        return {"prompt_token_ids": self.generation.jobs[0].prompt_tokens} if self._token_ids else {}

    def _scores(self) -> dict[str, Any]:
        """The field `prompt_logprobs`, if it was requested."""
        job, scores = self.generation.jobs[0], self._prompt_scores
        if job.params.prompt_logprobs is None or scores is None:
            return {}
        listed = prompt_logprobs(self._names, job.prompt_tokens, scores, job.params.prompt_logprobs)
        return {"prompt_logprobs": listed}

    def _read(self, choice: _Choice, update: Update) -> list[dict[str, Any]]:
        """Add an update to its choice; return the deltas of a stream."""
        choice.ids += update.all_tokens
        parts = choice.parser.add(update.text) if update.text else []
        if update.finish is not None:
            parts = [*parts, *choice.parser.finish()]
            choice.finish = self._parsers.finish(choice.parser, update.finish)
            choice.stop_reason = update.stop_reason
        return [
            self._delta(choice, part) for part in parts if part.kind != "reasoning" or self._parsers.shows_reasoning
        ]

    def _delta(self, choice: _Choice, part: Part) -> dict[str, Any]:
        """Add a part to its choice; return the delta of a stream. Only a call's first delta has its id and name."""
        if part.kind == "content":
            choice.content += part.text
            return {"content": part.text}
        if part.kind == "reasoning":
            choice.reasoning += part.text
            return dict.fromkeys(REASONING_FIELDS, part.text)
        if part.kind == "call":
            call = _Call(self._parsers.call_id(), part.text)
            choice.calls.append(call)
            return {"tool_calls": [{"index": part.call, **call.body()}]}
        choice.calls[part.call].arguments += part.text
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _update_chunks(self, choice: _Choice, update: Update) -> list[dict[str, Any]]:
        """The chunks of an update: log-probabilities are in the first one, the finish reason is in the last."""
        deltas = self._read(choice, update)
        scored = self._with_logprobs and bool(update.tokens)
        if not deltas and (update.finish or scored):
            deltas = [{}] if update.finish else [{"content": ""}]
        chunks = [self._chunk(update.choice, delta) for delta in deltas]
        if scored:
            logprobs = chat_logprobs(self._names, update.tokens, update.logprobs or ())
            chunks[0]["choices"][0]["logprobs"] = logprobs
        if update.finish is not None:
            chunks[-1]["choices"][0] |= {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}
        if self._token_ids and chunks:
            chunks[0]["choices"][0]["token_ids"], choice.ids = choice.ids, []
        return chunks

    def _first_chunk(self, index: int) -> dict[str, Any]:
        """The chunk with a choice's role; that of the first choice has the prompt's token ids."""
        chunk = self._chunk(index, {"role": ROLE, "content": ""})
        return chunk if any(choice.begun for choice in self._choices) else {**chunk, **self._prompt_ids()}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope.wrap(CHUNK_KIND, [choice], **self._usage_chunks.field(self.generation))

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = chat_logprobs(self._names, choice.tokens, choice.scores) if self._with_logprobs else None
        return {
            "index": index,
            "message": {"role": ROLE, "content": _content(choice), "refusal": None, **_more(choice)},
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.ids} if self._token_ids else {}),
        }


def _content(choice: _Choice) -> str | None:
    """The text; null for a message that has only calls."""
    return choice.content if choice.content or not choice.calls else None


def _more(choice: _Choice) -> dict[str, Any]:
    """Parts of a message that most answers do not have."""
    calls: Sequence[dict[str, Any]] = [call.body() for call in choice.calls]
    return {
        **(dict.fromkeys(REASONING_FIELDS, choice.reasoning) if choice.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }
