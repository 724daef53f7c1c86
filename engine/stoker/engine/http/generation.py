"""The run of one HTTP request's prompts at the core: tokens and facts come in, text and usage go out.

One object per HTTP request, made by `front` and changed by the core's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace

from stoker.engine.core.core_client import CoreLost
from stoker.engine.core.core_group import Cores
from stoker.engine.core.messages import AddRequest, RequestFacts
from stoker.engine.errors import RequestRefused
from stoker.engine.http.beam_run import BeamRun
from stoker.engine.http.beam_search import Beam, BeamSettings
from stoker.engine.http.errors import engine_lost, from_refusal
from stoker.engine.http.generation_spans import traced
from stoker.engine.http.job import Job, Usage
from stoker.engine.http.job_follower import JobFollower, given_up
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.text import Detokenizer, OutputText
from stoker.engine.http.update import Update
from stoker.pod.tracing import NoTracer, Tracer

JOBS_AT_ONCE = 512
"""Jobs of one HTTP request at the core at one time. More would not be faster, and could exceed the core's queue."""


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
        follower = JobFollower(number, job, self.usage[number], texts, self._metrics, self._clock, self._load, rank)
        self._metrics.arrived()
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
            raise engine_lost(str(lost)) from lost

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
        return (await BeamRun(self._core, plain, settings, given_up, follow, rank=rank).beams())[:n]

    def _text(self, job: Job) -> OutputText:
        """The text of one choice, still empty."""
        params = job.params
        return OutputText(
            self._detokenizer(job), params.stop, include_stop=params.include_stop, min_tokens=params.min_tokens
        )
