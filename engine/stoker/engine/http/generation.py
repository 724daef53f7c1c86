"""The run of one HTTP request's prompts at the core: tokens and facts come in, text and usage go out.

One object per HTTP request, made by `front` and changed by the core's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

from stoker.engine.core.core_client import CoreLost, RunningRequest
from stoker.engine.core.core_group import Cores
from stoker.engine.core.messages import AddRequest, Delta, RequestFacts
from stoker.engine.errors import RequestRefused
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.beam_run import BeamRun
from stoker.engine.http.beam_search import Beam, BeamSettings
from stoker.engine.http.errors import ApiError, from_refusal
from stoker.engine.http.generation_spans import traced
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.text import Detokenizer, OutputText, Piece
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import Cause
from stoker.pod.tracing import NoTracer, Tracer

Finish = Literal["stop", "length"]
JOBS_AT_ONCE = 512
"""Jobs of one HTTP request at the core at one time. More would not be faster, and could exceed the core's queue."""


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
    keep_output: bool = True
    """False: only the prompt's log-probabilities are wanted; the one token that the core makes is dropped."""
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


@dataclass(frozen=True)
class Update:
    """New text and tokens of one choice of one job."""

    job: int
    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Where each token begins, in characters of the choice's text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop text or token of the request that ended it."""
    end_token: int | None = None
    """The end or stop token behind `tokens`, which usage counts."""

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens that were generated: `tokens` and the end or stop token."""
        return self.tokens if self.end_token is None else (*self.tokens, self.end_token)


class Generation:
    """All jobs of one HTTP request. Close `updates` (`aclosing`) to abort what still runs."""

    def __init__(
        self,
        core: Cores,
        jobs: Sequence[Job],
        detokenizer: Callable[[Job], Detokenizer],
        metrics: FrontMetrics,
        clock: Callable[[], float],
        load: LoadLedger,
    ) -> None:
        self._load = load
        self.follow: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered for the time of the run."""
        self.prefill = ""
        """`AddRequest.prefill` of all jobs."""
        self.place = 0
        """`AddRequest.place` of all jobs."""
        self.beginning = ""
        """`AddRequest.beginning` of a single job."""
        self.rank: int | None = None
        """The data rank that a router chose for a single job; None: each goes to the one with least to do."""
        self.trace = ""
        """`traceparent` of the request."""
        self.tracer: Tracer = NoTracer()
        self.jobs = tuple(jobs)
        self.usage = [Usage(len(job.prompt_tokens)) for job in jobs]
        self.shown: dict[tuple[int, int], str] = {}
        """Text that another engine has sent, by (job, choice)."""
        self._resumed_texts: dict[int, list[OutputText]] = {}
        self._core = core
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._clock = clock

    def replay(self) -> None:
        """Rebuild the texts of choices that another engine began; updates go on behind them."""
        for number, job in enumerate(self.jobs):
            if job.emitted:
                self._resumed_texts[number] = [self._replayed(number, choice) for choice in range(job.params.n)]

    def _replayed(self, number: int, choice: int) -> OutputText:
        job = self.jobs[number]
        text, emitted = self._text(job), job.emitted[choice]
        piece = text.add(emitted.tokens)
        shown = piece.text if not emitted.ended or piece.stopped else piece.text + text.finish().text
        self.shown[number, choice] = shown
        self.usage[number].completion_tokens += emitted.num_tokens
        return text

    async def updates(self) -> AsyncGenerator[Update]:
        """Yield the updates of all jobs in the order of their arrival.

        Raises:
            ApiError: a job was refused, failed or was aborted; the others are aborted with it.
        """
        if len(self.jobs) == 1:
            with self._followed():
                async with aclosing(self._run(0)) as only:
                    async for update in only:
                        yield update
            return
        with self._followed():
            async with aclosing(self._run_all()) as updates:
                async for update in updates:
                    yield update

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Follow the run in the log of requests and in a span."""
        arrival_s = self.jobs[0].arrival_s
        with (
            self.follow(),
            traced(self.tracer, self.trace, arrival_s, self._clock, lambda: [u.facts for u in self.usage]) as span,
        ):
            self.trace = span
            yield

    async def _run_all(self) -> AsyncGenerator[Update]:
        news: asyncio.Queue[Update | BaseException | None] = asyncio.Queue()
        turns = asyncio.Semaphore(JOBS_AT_ONCE)
        tasks = [asyncio.create_task(self._collect(number, news, turns)) for number in range(len(self.jobs))]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(
        self, number: int, news: asyncio.Queue[Update | BaseException | None], turns: asyncio.Semaphore
    ) -> None:
        try:
            async with turns, aclosing(self._run(number)) as updates:
                async for update in updates:
                    news.put_nowait(update)
            news.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by `updates`
            news.put_nowait(error)

    async def _run(self, number: int) -> AsyncGenerator[Update]:
        job = self.jobs[number]
        resumed = tuple(None if one.ended else one.tokens for one in job.emitted)
        if resumed and all(tokens is None for tokens in resumed):
            return
        request = AddRequest(
            job.id, job.prompt_tokens, job.params, job.arrival_s, job.priority, resumed, self.prefill, self.trace,
            self.place, self.beginning if len(self.jobs) == 1 else "",
        )  # fmt: skip
        rank = self._rank
        own_tokens = 0 if self.prefill else len(job.prompt_tokens)
        texts = self._resumed_texts.get(number) or [self._text(job) for _ in range(job.params.n)]
        follower = _Follower(number, job, self.usage[number], texts, self._metrics, self._clock, self._load, rank)
        try:
            if job.beams is not None:
                with self._load.job(job.id, own_tokens, rank):
                    for choice, beam in enumerate(await self._searched(number, request, job.beams, rank)):
                        yield follower.follow_beam(choice, beam)
                return
            with self._load.job(job.id, own_tokens, rank), self._core.request(request, rank) as running:
                async for delta in running.deltas():
                    self._load.first_token(job.id, delta.facts)
                    yield follower.follow(delta, running)
        except RequestRefused as refused:
            raise from_refusal(refused) from refused
        except CoreLost as lost:
            raise _engine_lost(str(lost)) from lost

    @property
    def _rank(self) -> int:
        """The data rank that gets a job. Several jobs are dealt out: no router has weighed each of them."""
        if self.rank is None or len(self.jobs) > 1:
            return self._core.next_rank
        return self.rank

    async def _searched(self, number: int, request: AddRequest, settings: BeamSettings, rank: int) -> list[Beam]:
        """The best outputs of a job, as many as it has choices."""
        usage, n = self.usage[number], request.params.n

        def follow(facts: RequestFacts) -> None:
            usage.cached_tokens = facts.cached_tokens
            usage.facts = dict.fromkeys(range(n), facts)
            self._load.first_token(request.request_id, facts)

        plain = replace(request, prefill="", beginning="")
        return (await BeamRun(self._core, plain, settings, _given_up, follow, rank=rank).beams())[:n]

    def _text(self, job: Job) -> OutputText:
        """The text of one choice, still empty."""
        params = job.params
        return OutputText(
            self._detokenizer(job), params.stop, include_stop=params.include_stop, min_tokens=params.min_tokens
        )


class _Follower:
    """Follows the choices of one job: text, usage, metrics."""

    def __init__(
        self, number: int, job: Job, usage: Usage, texts: Sequence[OutputText], metrics: FrontMetrics,
        clock: Callable[[], float], load: LoadLedger, rank: int,
    ) -> None:  # fmt: skip
        self._load, self._rank = load, rank
        self._number = number
        self._job = job
        self._usage = usage
        self._texts = texts
        """One for each choice."""
        self._metrics = metrics
        self._clock = clock
        self._seen_s: dict[int, float] = {}
        self._facts: dict[int, RequestFacts] = {}
        ended = {choice: one for choice, one in enumerate(job.emitted) if one.ended}
        self._output_tokens: dict[int, int] = {choice: one.num_tokens for choice, one in ended.items()}
        """Output tokens of each choice that has ended."""

    def follow(self, delta: Delta, running: RunningRequest) -> Update:
        """Turn a delta into an update.

        Raises:
            ApiError: the core gave the choice up.
        """
        if delta.facts is not None:
            self._facts[delta.choice] = self._usage.facts[delta.choice] = delta.facts
            self._usage.cached_tokens = max(self._usage.cached_tokens, delta.facts.cached_tokens)
        if delta.finish_reason in ("error", "abort"):
            self._metrics.finished(self._facts.get(delta.choice))
            raise _given_up(delta)
        piece = self._piece(delta)
        self._count(delta, piece)
        if piece.stopped and delta.finish_reason is None:
            running.finish(delta.choice)
        finish: Finish | None = "stop" if piece.stopped else _finish(delta)
        if finish is not None and not self._job.keep_output:
            finish = "length"
        if finish is not None:
            self._finish_choice(delta.choice, self._final_facts(delta))
        return self._update(delta, piece, finish)

    def follow_beam(self, choice: int, beam: Beam) -> Update:
        """Turn a whole output of a search into the update of its choice."""
        count = self._job.params.logprobs
        scores = tuple(replace(score, top=score.top[:count]) for score in beam.scores) if count is not None else None
        reason: Finish = "length" if beam.end_token is None else "stop"
        self._facts[choice] = replace(self._usage.facts[choice], output_tokens=beam.num_tokens)
        delta = Delta(
            self._job.id, choice, beam.tokens, scores, None, reason, beam.end_token, None, self._facts[choice]
        )
        piece = self._piece(delta)
        self._count(delta, piece)
        self._finish_choice(choice, self._facts[choice])
        return self._update(delta, piece, reason)

    def _finish_choice(self, choice: int, facts: RequestFacts | None) -> None:
        if facts is not None:
            self._usage.facts[choice] = facts
        self._metrics.finished(facts)
        self._output_tokens[choice] = facts.output_tokens if facts is not None else 0
        if len(self._output_tokens) == self._job.params.n:
            self._metrics.finished_request(max(self._output_tokens.values()))

    def _piece(self, delta: Delta) -> Piece:
        if not self._job.keep_output:
            return Piece("", 0, ())
        piece = self._texts[delta.choice].add(delta.tokens)
        if delta.finish_reason is None or piece.stopped:
            return piece
        rest = self._texts[delta.choice].finish()
        return Piece(piece.text + rest.text, piece.num_tokens, piece.offsets, rest.stop)

    def _count(self, delta: Delta, piece: Piece) -> None:
        """Count usage and observe times. An end token counts, because it was generated."""
        if self._job.keep_output:
            self._usage.completion_tokens += piece.num_tokens + (delta.stop_token is not None and not piece.stopped)
        now = self._clock()
        before = self._seen_s.get(delta.choice)
        if before is None:
            self._metrics.first_token(now - self._job.arrival_s)
        elif delta.tokens:
            self._metrics.more_tokens(now - before, len(delta.tokens))
            self._load.gap((now - before) / len(delta.tokens), self._rank)
        self._seen_s[delta.choice] = now

    def _final_facts(self, delta: Delta) -> RequestFacts | None:
        """Return the facts of a choice that ended. After a stop text they are the first delta's, brought up to date."""
        facts = self._facts.get(delta.choice)
        if facts is None or delta.facts is facts:
            return facts
        now = self._clock()
        count = self._texts[delta.choice].num_tokens
        return replace(facts, output_tokens=count, last_token_s=now, finished_s=now)

    def _update(self, delta: Delta, piece: Piece, finish: Finish | None) -> Update:
        count = piece.num_tokens
        named = delta.stop_token if delta.stop_token in self._job.params.stop_token_ids else None
        return Update(
            job=self._number,
            choice=delta.choice,
            text=piece.text,
            tokens=delta.tokens[:count],
            offsets=piece.offsets,
            logprobs=delta.logprobs[:count] if delta.logprobs is not None else None,
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=named if piece.stop is None else piece.stop,
            end_token=None if piece.stopped or not self._job.keep_output else delta.stop_token,
        )


def _finish(delta: Delta) -> Finish | None:
    return delta.finish_reason if delta.finish_reason in ("stop", "length") else None


def _given_up(delta: Delta) -> ApiError:
    if delta.finish_reason == "abort":
        return ApiError(
            503,
            "The engine is shutting down; the answer is not complete. Send the request again.",
            code="aborted",
            retry_after_s=1,
        )
    if delta.error is not None and delta.error.startswith(f"{Cause.RANK_FAILED}: "):
        return _engine_lost(delta.error)  # the core ends with all its requests; another engine can go on
    return ApiError(500, f"The request failed: {delta.error or 'no reason was given'}", code="generation_failed")


def _engine_lost(why: str) -> ApiError:
    return ApiError(503, f"The engine core has ended: {why}", code="engine_lost", retry_after_s=1)
