"""`POST /v1/responses`: the answer's shape, whole and as typed events. One answer, made of output items.

Called by `front`. The text goes through the same parser as a chat's: reasoning, message and calls become items.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.errors import ApiError
from stoker.engine.http.generation import Generation
from stoker.engine.http.openai.answer import Envelope
from stoker.engine.http.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from stoker.engine.http.openai.parser_choice import AnswerParsers
from stoker.engine.http.openai.responses_body import ResponsesBody, renamed
from stoker.engine.http.openai.tool_parser import Part
from stoker.engine.http.openai.usage import usage
from stoker.engine.http.update import Update

Event = dict[str, Any]
Score = dict[str, Any]
"""The log-probability of a token, with its alternatives."""

DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Item -> the begin of its events' types."""


class OutputItem:
    """One item of the output, so far."""

    def __init__(self, kind: str, index: int, *, name: str = "", call_id: str = "") -> None:
        self.kind, self.index, self.name, self.call_id = kind, index, name, call_id
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.text = ""
        """The message, the reasoning, or the arguments."""
        self.scores: list[Score] = []
        """Log-probabilities of the message's tokens, where they were requested."""

    def body(self, status: str) -> dict[str, Any]:
        own = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**own, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if status != "in_progress" else []
        if self.kind == "reasoning":
            return {**own, "summary": [], "content": content}
        return {**own, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """The content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.scores}

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.body("in_progress")}
        if self.kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "part": self.part()}

    def add(self, text: str, scores: list[Score]) -> Event:
        self.text += text
        self.scores = [*self.scores, *scores]
        more: dict[str, Any] = {"logprobs": scores} if self.kind == "message" else {}
        return {"type": f"response.{DELTAS[self.kind]}.delta", **self._place(), "delta": text, **more}

    def end(self, status: str) -> Iterator[Event]:
        done = f"response.{DELTAS[self.kind]}.done"
        if self.kind == "function_call":
            yield {"type": done, **self._place(), "name": self.name, "arguments": self.text}
        else:
            more: dict[str, Any] = {"logprobs": self.scores} if self.kind == "message" else {}
            yield {"type": done, **self._place(), "text": self.text, **more}
            yield {"type": "response.content_part.done", **self._place(), "part": self.part()}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.body(status)}

    def _place(self) -> dict[str, Any]:
        content = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **content}


KINDS = {"content": "message", "reasoning": "reasoning"}


class ResponsesAnswer:
    """One response. A whole answer is the last event of its stream."""

    def __init__(
        self,
        envelope: Envelope,
        generation: Generation,
        parsers: AnswerParsers,
        names: TokenNames,
        body: ResponsesBody,
        *,
        timing: bool,
    ) -> None:
        """`timing`: the usage has the request's times."""
        self._envelope, self.generation, self._parsers, self._body = envelope, generation, parsers, body
        self._names, self._timing = names, timing
        self._parser = parsers.parser()
        self._items: list[OutputItem] = []
        self._status = "in_progress"
        self._reasoning_tokens = 0
        self._scores: list[Score] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._prompt_scores: Sequence[TokenLogprobs | None] | None = None
        self._error: ApiError | None = None
        """Why the answer ended before its end."""

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one object."""
        response: dict[str, Any] = {}
        async with aclosing(self.chunks()) as events:
            async for event in events:
                response = event.get("response", response)
        return {**response, **self._prompt_logprobs()}

    async def chunks(self) -> AsyncGenerator[Event]:
        """Yield the events of the answer as it arrives, numbered from 0."""
        number = 0
        async with aclosing(self._events()) as events:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1

    async def _events(self) -> AsyncGenerator[Event]:
        finish, begun = None, False
        try:
            async with aclosing(self._updates()) as updates:
                async for update in updates:
                    if not begun:  # after the first update, because a refusal must keep its status
                        begun = True
                        yield {"type": "response.created", "response": self._response()}
                        yield {"type": "response.in_progress", "response": self._response()}
                    finish = update.finish or finish
                    for part in self._parts(update):
                        for event in self._part_events(part):
                            yield event
        except ApiError as error:
            if begun:
                self._status, self._error = "failed", error
                yield {"type": "response.failed", "response": self._response()}
            raise
        self._status = "incomplete" if finish == "length" else "completed"
        for event in self._last_events():
            yield event
        yield {"type": f"response.{self._status}", "response": self._response()}

    def _last_events(self) -> Iterator[Event]:
        """The end of the last item. An answer without text has an empty message."""
        if not self._items:
            yield from self._open(OutputItem("message", 0))
        if self._items[-1].kind == "message":
            self._items[-1].scores += self._new_scores()
        yield from self._items[-1].end(self._status)

    async def _updates(self) -> AsyncGenerator[Update]:
        """The updates, token by token where tokens must be told apart: those of reasoning are counted, and have no
        log-probabilities."""
        shown = 0
        try:
            async with aclosing(self.generation.updates()) as updates:
                async for update in updates:
                    apart = update.logprobs is not None or self._may_reason()
                    for one in update.by_token(shown) if apart else (update,):
                        yield one
                    shown += len(update.text)
        except ApiError as error:
            raise renamed(error) from error

    def _parts(self, update: Update) -> list[Part]:
        reasoned = self._reasons()
        parts = self._parser.add(update.text) if update.text else []
        self._prompt_scores = update.prompt_logprobs or self._prompt_scores
        if update.logprobs is not None:
            self._scores += chat_logprobs(self._names, update.tokens, update.logprobs)["content"]
        if self._reasons():
            self._reasoning_tokens += len(update.tokens)
        elif reasoned:  # this was the mark of its end
            self._scores = []
        return [*parts, *self._parser.finish()] if update.finish is not None else parts

    def _reasons(self) -> bool:
        """Whether the text is within its reasoning."""
        reasoning = self._parser.reasoning
        return reasoning is not None and reasoning.begun and not reasoning.ended

    def _may_reason(self) -> bool:
        """Whether reasoning may still begin or end."""
        return self._parser.reasoning is not None and not self._parser.reasoning.ended

    def _new_scores(self) -> list[Score]:
        """The log-probabilities that belong to the text that comes now."""
        scores, self._scores = self._scores, []
        return scores

    def _prompt_logprobs(self) -> dict[str, Any]:
        """The field `prompt_logprobs`, if it was requested."""
        job, scores = self.generation.jobs[0], self._prompt_scores
        if job.params.prompt_logprobs is None or scores is None:
            return {}
        listed = prompt_logprobs(self._names, job.prompt_tokens, scores, job.params.prompt_logprobs)
        return {"prompt_logprobs": listed}

    def _part_events(self, part: Part) -> Iterator[Event]:
        """The events of new text; another kind of text ends one item and begins the next."""
        last = self._items[-1] if self._items else None
        scores = self._new_scores()
        if part.kind == "reasoning" and not self._parsers.shows_reasoning:
            return
        if part.kind == "call":
            call_id = self._parsers.call_id()
            yield from self._open(OutputItem("function_call", len(self._items), name=part.text, call_id=call_id))
            return
        if part.kind != "arguments" and (last is None or last.kind != KINDS[part.kind]):
            yield from self._open(OutputItem(KINDS[part.kind], len(self._items)))
        yield self._items[-1].add(part.text, scores if part.kind == "content" else [])

    def _open(self, item: OutputItem) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].end("completed")
        self._items.append(item)
        yield from item.begin()

    def _response(self) -> dict[str, Any]:
        """The response object, so far."""
        ended, body = self._status != "in_progress", self._body
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        failed = {"code": "server_error", "message": str(self._error)} if self._error is not None else None
        last, unfinished = len(self._items) - 1, "incomplete" if self._status == "failed" else self._status
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "status": self._status,
            "error": failed,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._envelope.model,
            "output": [
                item.body(unfinished if place == last else "completed") for place, item in enumerate(self._items)
            ],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "previous_response_id": None,
            "store": False,
            "temperature": self.generation.jobs[0].params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self.generation.jobs[0].params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self.generation.usage, timing=self._timing)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": counts["total_tokens"],
            **({"timing": counts["timing"]} if self._timing else {}),
        }
