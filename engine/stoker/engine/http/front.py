"""The front of the served model: turns bodies into jobs and jobs into answers. Without HTTP and without torch.

Called by `server`; made by `program`. Whether requests are taken, and with which tokenizer, `served_model` knows; the
run of a request belongs to `generation`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stoker.engine.config import Role
from stoker.engine.core.core_client import CoreLost
from stoker.engine.core.core_group import Cores
from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import ModelFacts
from stoker.engine.http.errors import ApiError, bad_request, model_not_found, shortened
from stoker.engine.http.generation import Generation
from stoker.engine.http.job import Job
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.load_reports import LoadReports
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.openai.answer import Envelope, UsageChunks
from stoker.engine.http.openai.chat import ChatAnswer
from stoker.engine.http.openai.completions import CompletionAnswer, CompletionFields
from stoker.engine.http.openai.logprobs import TokenNames
from stoker.engine.http.openai.params import (
    beam_settings,
    chat_params,
    check_length,
    completion_params,
    output_limit,
    truncated,
)
from stoker.engine.http.openai.parser_choice import AnswerParsers, ParserChoice
from stoker.engine.http.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from stoker.engine.http.openai.responses import ResponsesAnswer
from stoker.engine.http.openai.responses_body import ResponsesBody, renamed
from stoker.engine.http.openai.resume import ResumeState, begun_job, check_resumed
from stoker.engine.http.openai.tool_parser import ReasoningParser
from stoker.engine.http.openai.tools import tool_use
from stoker.engine.http.prompts import (
    check_prompt,
    check_tokens,
    decode,
    echo_all,
    encode,
    encode_all,
    encode_bad_words,
    encode_chat,
    encode_rendered,
    render_chat,
    without_oldest,
)
from stoker.engine.http.request_log import LoggedRequest, RequestLog
from stoker.engine.http.served_model import ServedModel
from stoker.engine.http.text import Detokenizer, TextCodec
from stoker.engine.sampling import SamplingParams
from stoker.pod.tracing import NoTracer, Tracer

T = TypeVar("T")


class PreparedChat(NamedTuple):
    """A conversation that was checked; the core has not got it yet."""

    codec: TextCodec
    envelope: Envelope
    generation: Generation
    parsers: AnswerParsers


class Front:
    """One front of an engine. Templates and tokenising run in threads: a long prompt does not stop other streams."""

    def __init__(
        self,
        core: Cores,
        names: Sequence[str],
        metrics: FrontMetrics,
        open_codec: Callable[[Path], TextCodec],
        *,
        parsers: ParserChoice = ParserChoice(),  # noqa: B008 - a frozen value
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        managed: str = "this engine serves one model",
        role: Role = "colocated",
    ) -> None:
        """`managed`: why clients may not load or unload models. `role`: what routers should prefer it for."""
        self.managed = managed
        self.core = core
        self.served = ServedModel(core, open_codec)
        self.names = tuple(names)
        self.ledger = LoadLedger(core.num_ranks)
        self.reports = LoadReports(
            self.ledger, role, lambda: self.served.transfer, lambda: self.served.queue_s,
            store=lambda: self.served.shared_store, step_tokens=lambda: self.served.step_tokens,
            transfer_of=core.transfer_of,
        )  # fmt: skip
        self.metrics = metrics
        self.parsers = parsers
        self.clock = clock
        self.unix_time = unix_time
        self.log = RequestLog()
        self.tracer: Tracer = NoTracer()
        """For spans of requests."""
        self.elsewhere: Callable[[str], Awaitable[dict[str, Any] | None]] = _nowhere
        """Looks for a request at the engine's other fronts."""
        self.created = int(unix_time())

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.served.ready

    def health(self) -> dict[str, str]:
        """`GET /health`, with the reason."""
        return self.served.health()

    @property
    def counters(self) -> LoadCounters:
        """What it has counted, for `/status`."""
        return self.metrics.load

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`, with the defaults that `generation_config.json` brings."""
        facts = self.served.facts
        more: dict[str, Any] = {}
        if facts is not None:
            more = {"max_model_len": facts.max_model_len, "generation_defaults": vars(self.served.defaults)}
        root = {"object": "model", "created": self.created, "owned_by": "stoker", "root": self.names[0], "parent": None}
        return {"object": "list", "data": [{"id": name, **root, **more} for name in self.names]}

    def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/{name}`."""
        found: dict[str, Any] | None = next((card for card in self.models()["data"] if card["id"] == name), None)
        if found is None:
            raise model_not_found(name, self.names)
        return found

    def load_reports(self) -> AsyncGenerator[bytes]:
        """The events of `GET /load`, until the engine takes no requests."""
        return self.reports.stream(lambda: self.ready)

    async def load(self, name: str) -> dict[str, Any]:
        """`POST /v1/models/{name}/load`: refused, as is `unload`. Raises ApiError 409."""
        raise ApiError(409, f"The model {shortened(name)} cannot be loaded: {self.managed}.", code="model_fixed")

    async def unload(self, name: str) -> dict[str, Any]:
        """`DELETE /v1/models/{name}`."""
        raise ApiError(409, f"The model {shortened(name)} cannot be unloaded: {self.managed}.", code="model_fixed")

    def _name(self, asked: str | None) -> str:
        """Return the name to answer with: the first, if the client names none."""
        if asked is not None and asked not in self.names:
            raise model_not_found(asked, self.names)
        return asked if asked is not None else self.names[0]

    # Completions.

    async def completion(
        self,
        body: CompletionBody,
        call_id: str,
        arrival_s: float,
        request_id: str = "",
        resumed: ResumeState | None = None,
    ) -> CompletionAnswer:
        """Tokenise and check a completion request. The core gets it when the answer is read.

        `resumed`: what the client has of the stream already; the answer is the rest.

        Raises:
            ApiError: the request is refused.
        """
        name = self._name(body.model)
        body.check_supported()
        facts, codec = self.served.taken()
        prompts = await self._encode_prompts(codec, body)
        bad_sequences = await self._encode_bad_words(codec, body)
        jobs = []
        for number, whole in enumerate(prompts):
            prompt = truncated(body, whole, facts.max_model_len, output_limit(body))
            room = facts.max_model_len - len(prompt)
            params = completion_params(body, self.served.defaults, room, bad_sequences)
            _check(facts, body, prompt, params)
            job_id = f"{call_id}-{number}"
            beams = beam_settings(body, params, facts.eos_token_ids)
            job = Job(job_id, prompt, params, arrival_s, body.priority, continues=True, beams=beams)
            jobs.append(begun_job(job, number, resumed))
        echoes = None
        if body.echo:
            shown = [job.prompt_tokens for job in jobs]
            echoes = await self._in_thread(echo_all, codec, shown, body.skip_special_tokens)
        envelope = self._envelope("cmpl-", name, facts, resumed)
        check_resumed(resumed, body, jobs, _fingerprint(facts), facts.vocab_size)
        generation = self._generation(codec, jobs)
        if resumed is not None:
            await self._in_thread(generation.replay)
        self._log(envelope, generation, request_id)
        fields = CompletionFields(body.n, body.num_logprobs, body.prompt_logprobs, body.return_token_ids)
        names = TokenNames(codec, as_ids=body.return_tokens_as_token_ids)
        return CompletionAnswer(envelope, generation, names, _usage_chunks(body), echoes, fields)

    async def chat(
        self, body: ChatBody, call_id: str, arrival_s: float, request_id: str = "", resumed: ResumeState | None = None
    ) -> ChatAnswer:
        """Render, tokenise and check a conversation, as `completion` does a prompt."""
        prepared = await self._prepare(body, call_id, arrival_s, request_id, "chatcmpl-", resumed)
        names = TokenNames(prepared.codec, as_ids=body.return_tokens_as_token_ids)
        return ChatAnswer(
            prepared.envelope, prepared.generation, names, _usage_chunks(body), prepared.parsers,
            token_ids=body.return_token_ids,
        )  # fmt: skip

    async def responses(
        self, body: ResponsesBody, call_id: str, arrival_s: float, request_id: str = ""
    ) -> ResponsesAnswer:
        """Prepare a response: the chat request that it means."""
        chat = body.chat()
        try:
            chat = chat if body.truncation == "disabled" else await self._without_oldest(chat)
            prepared = await self._prepare(chat, call_id, arrival_s, request_id, "resp_")
        except ApiError as error:
            raise renamed(error) from error
        names = TokenNames(prepared.codec, as_ids=chat.return_tokens_as_token_ids)
        return ResponsesAnswer(
            prepared.envelope, prepared.generation, prepared.parsers, names, body, timing=chat.include_timing
        )

    async def _without_oldest(self, body: ChatBody) -> ChatBody:
        """Return the conversation without its oldest messages that do not fit beside the output."""
        facts, codec = self.served.taken()
        most_tokens = facts.max_model_len - (body.output_limit or 1)
        return await self._in_thread(without_oldest, codec, body, most_tokens, field="messages")

    async def _prepare(
        self,
        body: ChatBody,
        call_id: str,
        arrival_s: float,
        request_id: str,
        prefix: str,
        resumed: ResumeState | None = None,
    ) -> PreparedChat:
        """Render, tokenise and check a conversation."""
        name = self._name(body.model)
        body.check_supported()
        facts, codec = self.served.taken()
        use = body.tool_use  # before the template reads the tools
        text = await self._in_thread(
            render_chat, codec, body.messages, body.add_generation_prompt, body.tools, body.template_settings,
            body.continue_final_message, field="messages",
        )  # fmt: skip
        whole = await self._in_thread(encode_rendered, codec, text, body.add_special_tokens, field="messages")
        prompt = truncated(body, whole, facts.max_model_len, body.output_limit)
        bad_sequences = await self._encode_bad_words(codec, body)
        params = chat_params(body, self.served.defaults, facts.max_model_len - len(prompt), bad_sequences)
        parsers = self.parsers.for_request(
            use.beside(params.grammar),
            codec.template_source,
            reasons_already=ReasoningParser.is_open(text, goes_on=body.continue_final_message),
            shows_reasoning=body.include_reasoning,
        )
        if use.is_forced:  # a call that a stop text or token cuts has arguments that are no JSON; its grammar ends it
            params = replace(params, stop=(), stop_token_ids=())
        if parsers.needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
        if (grammar := params.grammar or parsers.grammar) is not None:
            params = replace(params, grammar=replace(grammar, reasoning=parsers.place))
        _check(facts, body, prompt, params)
        beams = beam_settings(body, params, facts.eos_token_ids)
        goes_on = body.continue_final_message
        job = Job(f"{call_id}-0", prompt, params, arrival_s, body.priority, continues=goes_on, beams=beams)
        job = begun_job(job, 0, resumed)
        envelope = self._envelope(prefix, name, facts, resumed)
        check_resumed(resumed, body, [job], _fingerprint(facts), facts.vocab_size)
        generation = self._generation(codec, [job])
        if resumed is not None:
            await self._in_thread(generation.replay)
        self._log(envelope, generation, request_id)
        return PreparedChat(codec, envelope, generation, parsers)

    def _generation(self, codec: TextCodec, jobs: Sequence[Job]) -> Generation:
        def detokenizer(job: Job) -> Detokenizer:
            prompt = job.prompt_tokens if job.continues else ()
            return codec.detokenizer(skip_special_tokens=job.params.skip_special_tokens, prompt=prompt)

        generation = Generation(self.core, jobs, detokenizer, self.metrics, self.clock, self.ledger)
        generation.tracer = self.tracer
        return generation

    def _envelope(self, prefix: str, name: str, facts: ModelFacts, resumed: ResumeState | None = None) -> Envelope:
        fingerprint = _fingerprint(facts)
        if resumed is not None:
            return Envelope(resumed.id, resumed.created, name, fingerprint)
        return Envelope(f"{prefix}{uuid.uuid4().hex}", int(self.unix_time()), name, fingerprint)

    def _log(self, envelope: Envelope, generation: Generation, request_id: str) -> None:
        """Let the request be found, and follow its run."""
        jobs = tuple(job.id for job in generation.jobs)
        logged = LoggedRequest(
            envelope.id, request_id, envelope.model, envelope.created, jobs, generation.usage,
            generation.jobs[0].arrival_s, self.clock,
        )  # fmt: skip
        generation.follow = logged.follow
        self.log.add(logged)

    async def request(self, name: str) -> dict[str, Any]:
        """`GET /v1/requests/{id}`: by the answer's id or by `X-Request-Id`.

        Raises:
            ApiError: 404, no recent request of this engine has the id; 503, the core does not answer.
        """
        body = await self.own_request(name) or await self.elsewhere(name)
        if body is None:
            message = f"No recent request of this engine has the id {shortened(name)}."
            raise ApiError(404, message, param="id", code="request_not_found")
        return body

    async def own_request(self, name: str) -> dict[str, Any] | None:
        """A request of this front by its id; None where it has none of that id. Raises ApiError 503."""
        logged = self.log.find(name)
        if logged is None:
            return None
        if logged.end is not None:
            return logged.body(())
        try:
            return logged.body(await self.core.inspect(logged.job_ids))
        except CoreLost as lost:
            raise ApiError(503, f"The engine core does not answer: {lost}", code="not_ready", retry_after_s=1) from lost

    # Tokens.

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """`POST /tokenize`."""
        self._name(body.model)
        facts, codec = self.served.taken()
        if body.messages is not None:
            tool_use(body.tools, None, None)  # refuses what a chat would
            tokens = await self._in_thread(
                encode_chat,
                codec,
                body.messages,
                body.add_generation_prompt,
                body.tools,
                body.chat_template_kwargs or {},
                body.continue_final_message,
                body.add_special_tokens,
                field="messages",
            )
        else:
            special = body.add_special_tokens if body.add_special_tokens is not None else True
            tokens = tuple(await self._in_thread(encode, codec, body.prompt or "", special, field="prompt"))
        names = TokenNames(codec)
        strings = [names.name(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": facts.max_model_len,
            "tokens": list(tokens),
            "token_strs": strings,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """`POST /detokenize`."""
        self._name(body.model)
        facts, codec = self.served.taken()
        check_tokens(body.tokens, facts.vocab_size, "tokens")
        return {"prompt": await self._in_thread(decode, codec, body.tokens, body.skip_special_tokens, field="tokens")}

    async def _encode_prompts(self, codec: TextCodec, body: CompletionBody) -> list[tuple[int, ...]]:
        """Tokenise the prompts. Those that come as token ids need no thread, whose switches would cost more."""
        if any(isinstance(prompt, str) for prompt in body.prompts):
            return await self._in_thread(encode_all, codec, body, field="prompt")
        return encode_all(codec, body)

    async def _encode_bad_words(self, codec: TextCodec, body: GenerationBody) -> tuple[tuple[int, ...], ...]:
        return await self._in_thread(encode_bad_words, codec, body, field="bad_words") if body.bad_words else ()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any, field: str | None = None) -> T:
        """Work on the body's field. Raises ApiError 400."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except ValueError as error:
            raise bad_request(str(error), field, "invalid_value") from error


async def _nowhere(_: str) -> None:
    """The answer of an engine with one front."""


def _check(facts: ModelFacts, body: CompletionBody | ChatBody, prompt: tuple[int, ...], params: SamplingParams) -> None:
    """Refuse a prompt that does not fit. Raises ApiError: 400, or 500 for a tokenizer of another model."""
    assert params.max_tokens is not None
    check_length(body, facts.max_model_len, len(prompt), params.max_tokens)
    check_prompt(body, prompt, facts.vocab_size)  # of a length that takes no time


def _fingerprint(facts: ModelFacts) -> str | None:
    return f"fp_{facts.digest[:10]}" if facts.digest else None


def _usage_chunks(body: GenerationBody) -> UsageChunks:
    return UsageChunks(last=body.wants_usage, running=body.wants_running_usage, timing=body.include_timing)
