"""`POST /v1/chat/completions`: the answer's shape, whole and in chunks.

Pure; called by `front`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.generation import Generation, Update
from stoker.engine.http.openai.answer import Envelope, UsageChunks
from stoker.engine.http.openai.logprobs import TokenNames, chat_logprobs
from stoker.engine.http.openai.usage import usage

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
ROLE = "assistant"


@dataclass
class _Choice:
    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)


class ChatAnswer:
    """One conversation, `n` answers to it."""

    def __init__(
        self, envelope: Envelope, generation: Generation, names: TokenNames, usage_chunks: UsageChunks
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._names = names
        self._usage_chunks = usage_chunks
        self._with_logprobs = generation.jobs[0].params.logprobs is not None

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one object."""
        choices = [_Choice() for _ in range(self._generation.jobs[0].params.n)]
        async with aclosing(self._generation.updates()) as updates:
            async for update in updates:
                _add(choices[update.choice], update)
        bodies = [self._message(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.wrap(KIND, bodies, usage=usage(self._generation.usage))

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the answer as it arrives: a choice begins with its role, and its last chunk has the finish reason."""
        begun: set[int] = set()
        async with aclosing(self._generation.updates()) as updates:
            async for update in updates:
                if update.choice not in begun:
                    begun.add(update.choice)
                    yield self._chunk(update.choice, {"role": ROLE, "content": ""})
                if update.text or update.finish or (self._with_logprobs and update.tokens):
                    delta = {"content": update.text} if update.text or not update.finish else {}
                    yield self._chunk(update.choice, delta, update)
        if self._usage_chunks.last:
            yield self._envelope.wrap(CHUNK_KIND, [], usage=usage(self._generation.usage))

    def _chunk(self, index: int, delta: dict[str, Any], update: Update | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if update is not None:
            choice["finish_reason"] = update.finish
            if update.finish is not None:
                choice["stop_reason"] = update.stop_reason
            if self._with_logprobs and update.tokens:
                choice["logprobs"] = chat_logprobs(self._names, update.tokens, update.logprobs or ())
        return self._envelope.wrap(CHUNK_KIND, [choice], **self._usage_chunks.field(self._generation))

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = chat_logprobs(self._names, choice.tokens, choice.scores) if self._with_logprobs else None
        return {
            "index": index,
            "message": {"role": ROLE, "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }


def _add(choice: _Choice, update: Update) -> None:
    choice.text += update.text
    choice.finish = update.finish or choice.finish
    choice.stop_reason = update.stop_reason if update.stop_reason is not None else choice.stop_reason
    choice.tokens += update.tokens
    choice.scores += update.logprobs or ()
