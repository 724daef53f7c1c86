"""The engine as a library: requests in, deltas out, one step at a time. Owns the requests; one thread calls it."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stoker.engine.core.build_step import StepInput, StepOutput, build_step_input
from stoker.engine.core.messages import Delta, FinishReason, Stats, TokenLogprobs
from stoker.engine.core.request import Request, RequestKey, Sequence, State
from stoker.engine.core.scheduler import Chunk, Schedule, Scheduler
from stoker.engine.errors import ExecutorLost, RequestRefused
from stoker.engine.execution.executor import Executor, Result
from stoker.engine.sampling import SamplingParams

Addressed = tuple[str, Delta]
"""(front, delta)."""


@dataclass(frozen=True)
class Limits:
    """What the model allows."""

    vocab_size: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]


@dataclass
class _Result:
    """A step's output, perhaps put together from several attempts."""

    tokens: list[int] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    """One per chunk: why it could not be computed."""
    gone: set[int] = field(default_factory=set)
    """Samples of sequences that do not run any more."""

    def put(self, chunks: list[int], samples: list[int], output: StepOutput) -> None:
        """What these chunks and samples, computed on their own, gave."""
        for place, sample in enumerate(samples):
            self.tokens[sample] = output.tokens[place]
            self.valid[sample] = output.valid[place]
            self.logprobs[sample] = output.logprobs[place]
        for place, chunk in enumerate(chunks):
            self.prompt_logprobs[chunk] = output.prompt_logprobs[place]
            self.errors[chunk] = None


@dataclass
class _Flight:
    """A step that was given to the executor and whose result was not taken yet."""

    schedule: Schedule
    step: StepInput
    result: Result


class LLMEngine:
    """Continuous batching over one executor.

    `add_request` queues, `step` computes once and returns what is new, `abort_request` and `finish_choice` take requests
    out at any time. `front` names whose request it is: ids of different fronts are different requests.

    With `overlap` the host stays one step ahead of the device: `step` schedules and submits the next step before it takes
    the result of the one before. What a sequence computes after its end, which only that result shows, is thrown away.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlap: bool = False,
    ) -> None:
        self.executor, self.scheduler, self.limits, self.clock = executor, scheduler, limits, clock
        self.overlap = overlap
        self.requests: dict[RequestKey, Request] = {}
        self.num_steps = 0
        self.progressed_s = clock()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.num_refused: Counter[str] = Counter()
        self._arrivals = 0
        self._flights: deque[_Flight] = deque()

    def add_request(
        self,
        request_id: str,
        prompt_tokens: Seq[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        front: str = "",
    ) -> None:
        """Queue a request; a missing seed is drawn here.

        Raises:
            RequestRefused: with the field, the value and what is allowed.
        """
        try:
            max_tokens = self._check((front, request_id), prompt_tokens, params)
        except RequestRefused as refused:
            self.num_refused[refused.kind] += 1
            raise
        eos = () if params.ignore_eos else self.limits.eos_token_ids
        now_s = self.clock()
        request = Request(
            key=(front, request_id),
            prompt=tuple(prompt_tokens),
            params=params if params.seed is not None else params.with_seed(secrets.randbits(63)),
            max_tokens=max_tokens,
            stop_tokens=frozenset((*eos, *params.stop_token_ids)),
            arrival=self._arrivals,
            arrival_s=now_s if arrival_s is None else arrival_s,
            priority=priority,
        )
        if not self.has_unfinished:
            self.progressed_s = now_s  # until now there was nothing to do
        self._arrivals += 1
        self.requests[request.key] = request
        self.scheduler.add(request)

    def abort_request(self, request_id: str, *, front: str = "") -> list[Addressed]:
        """End every choice, whatever it is doing. Returns their last deltas; none for a request that has ended."""
        request = self.requests.get((front, request_id))
        return [] if request is None else self._end_all(request, "abort", None)

    def finish_choice(self, request_id: str, choice: int, *, front: str = "") -> None:
        """A stop text was found in this choice: it ends as a success. Harmless for a choice that has ended."""
        request = self.requests.get((front, request_id))
        for sequence in request.sequences if request is not None else ():
            if sequence.choice == choice and not sequence.state.finished:
                self._end(sequence, "stop")

    def end_everything(self, reason: FinishReason, error: str | None = None) -> list[Addressed]:
        """End all requests; their last deltas."""
        return [delta for request in list(self.requests.values()) for delta in self._end_all(request, reason, error)]

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[Addressed]:
        """Schedule, submit, take results: in the end one token for every sequence whose known tokens are all computed."""
        schedule = self.scheduler.schedule(self.clock())
        if schedule.chunks:
            self._flights.append(self._submit(schedule))
        deltas: list[Addressed] = []
        while len(self._flights) > (self.overlap and bool(schedule.chunks)):
            self._land(self._flights.popleft(), deltas)
        return deltas

    def stats(self) -> Stats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return Stats(
            time_s=self.clock(),
            steps=self.num_steps,
            progressed_s=self.progressed_s,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            owned_blocks=blocks.num_owned,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_generated_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            finished=dict(self.num_finished),
            refused=dict(self.num_refused),
        )

    # Taking a request.

    def _check(self, key: RequestKey, prompt: Seq[int], params: SamplingParams) -> int:
        """The most output tokens of a request that can be served; RequestRefused otherwise."""
        if key in self.requests:
            raise RequestRefused("invalid", f"request_id {key[1]!r} is in use", "request_id")
        if not prompt:
            raise RequestRefused("invalid", "prompt must have at least one token", "prompt")
        wrong = next((token for token in prompt if not 0 <= token < self.limits.vocab_size), None)
        if wrong is not None:
            allowed = f"token ids from 0 to {self.limits.vocab_size - 1}"
            raise RequestRefused("invalid", f"prompt must hold {allowed}, got {wrong}", "prompt")
        params.check_vocabulary(self.limits.vocab_size)
        max_tokens = self._max_tokens(len(prompt), params)
        self.scheduler.check(len(prompt), max_tokens, params.n)
        return max_tokens

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        longest = self.limits.max_model_len
        if num_prompt >= longest:
            message = f"the prompt has {num_prompt} tokens, and with one output token at most {longest} fit"
            raise RequestRefused("too_long", message, "prompt")
        if params.max_tokens is not None and num_prompt + params.max_tokens > longest:
            message = (
                f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} are more than the {longest} that fit"
            )
            raise RequestRefused("too_long", message, "max_tokens")
        max_tokens = longest - num_prompt if params.max_tokens is None else params.max_tokens
        if params.min_tokens > max_tokens:
            message = f"min_tokens must be at most {max_tokens}, what is left of {longest}, got {params.min_tokens}"
            raise RequestRefused("invalid", message, "min_tokens")
        return max_tokens

    # Computing.

    def _submit(self, schedule: Schedule) -> _Flight:
        step = build_step_input(self.num_steps, schedule, self.scheduler.blocks)
        self.num_steps += 1
        return _Flight(schedule, step, self.executor.submit(step))

    def _land(self, flight: _Flight, deltas: list[Addressed]) -> None:
        """Take one step's result."""
        result = self._result(flight)
        self.progressed_s = self.clock()
        tokens, valid, logprobs = result.tokens, result.valid, result.logprobs
        sample = 0
        for index, chunk in enumerate(flight.schedule.chunks):
            error, end = result.errors[index], sample + len(chunk.samples)
            if error is not None:
                deltas += self._end_all(chunk.sequence.request, "error", error)
            else:
                if not chunk.samples or any(valid[sample:end]):
                    self._keep(chunk, result.prompt_logprobs[index])  # what is not finite never enters the prefix cache
                for number, sequence in enumerate(chunk.samples, sample):
                    if not sequence.state.finished and number not in result.gone:
                        self._take(sequence, tokens[number], valid[number], logprobs[number], deltas)
            sample = end

    def _result(self, flight: _Flight) -> _Result:
        """The step's result. If it fails, its halves are tried again, so that only the chunk at fault has an error.

        Steps submitted after it have read what it failed to write: they are computed again, too.
        """
        try:
            return _whole(flight.step, flight.result.result())
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever one request does to a step must not reach the others
            for later in self._flights:
                _wait(later.result)
            result = self._retry(flight, error)
            for later in self._flights:
                later.result = self.executor.submit(later.step)
            return result

    def _retry(self, flight: _Flight, error: Exception) -> _Result:
        """Only for whom still runs: the seats and blocks of others may belong to somebody else by now."""
        result = _failed(flight.step, _text(error))
        chunks = flight.schedule.chunks
        alive = [index for index, chunk in enumerate(chunks) if chunk.sequence.state is State.RUNNING]
        for index in set(range(len(chunks))).difference(alive):
            result.errors[index] = None
        for number, sequence in enumerate(sequence for chunk in chunks for sequence in chunk.samples):
            if sequence.state is not State.RUNNING:
                result.gone.add(number)
                sequence.num_pending = 0  # one that was preempted meanwhile samples it again
        undone = tuple(entry for later in self._flights for entry in later.step.undone_copies())
        step = replace(flight.step, table=undone)
        self._halve(step, alive, result, error if len(alive) == len(chunks) else None)
        return result

    def _halve(self, step: StepInput, chunks: list[int], result: _Result, error: Exception | None) -> None:
        """Compute these chunks again, all at once if they have not failed together yet, else in halves."""
        if error is None and chunks:
            samples = [sample for sample, chunk in enumerate(step.sample_chunks) if chunk in chunks]
            samples = [sample for sample in samples if sample not in result.gone]
            try:
                result.put(chunks, samples, self.executor.submit(step.only(chunks, samples)).result())
                return
            except ExecutorLost:
                raise
            except Exception as again:  # noqa: BLE001 - as in `_result`
                error = again
        if len(chunks) == 1 and error is not None:
            result.errors[chunks[0]] = _text(error)
        elif chunks:
            self._halve(step, chunks[: len(chunks) // 2], result, None)
            self._halve(step, chunks[len(chunks) // 2 :], result, None)

    # Taking results.

    def _keep(self, chunk: Chunk, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The chunk is in the cache; log-probabilities computed again after a preemption replace the first ones."""
        self.scheduler.complete(chunk)
        if prompt_logprobs:
            chunk.sequence.prompt_logprobs[chunk.start + 1 :] = prompt_logprobs

    def _take(
        self, sequence: Sequence, token: int, valid: bool, logprobs: TokenLogprobs | None, deltas: list[Addressed]
    ) -> None:
        """One sampled token."""
        if not valid:
            self._end(sequence, "error")
            deltas.append(self._last(sequence, sequence.choice, "error", "the model's logits are not finite"))
            return
        first = sequence.first_token_s is None
        reason = sequence.append(token, self.progressed_s)
        self.num_generated_tokens += 1
        if first or reason is not None:
            deltas.append(self._first_or_last(sequence, token, logprobs, first, reason))
            return
        front, request_id = sequence.request.key
        scores = (logprobs,) if logprobs is not None else None
        deltas.append((front, Delta(request_id, sequence.choice, (token,), scores)))

    def _first_or_last(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, first: bool, reason: FinishReason | None
    ) -> Addressed:
        """The delta that carries the facts, and with the first one the prompt's scores."""
        starts = first and sequence.choice == 0
        if starts:
            self.num_prompt_tokens += sequence.num_prompt
        if reason is not None:
            self._end(sequence, reason)
        shown = (token,) if sequence.stop_token is None else ()
        scores_prompt = starts and sequence.request.params.prompt_logprobs is not None
        front, request_id = sequence.request.key
        return front, Delta(
            request_id=request_id,
            choice=sequence.choice,
            tokens=shown,
            logprobs=(logprobs,) * len(shown) if logprobs is not None else None,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if scores_prompt else None,
            finish_reason=reason,
            stop_token=sequence.stop_token,
            facts=sequence.facts(self.progressed_s),
        )

    # Ending.

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.end(sequence, reason)
        self.num_finished[reason] += 1
        if sequence.request.finished:
            del self.requests[sequence.request.key]

    def _end_all(self, request: Request, reason: FinishReason, error: str | None) -> list[Addressed]:
        """Every choice that has not ended, those that have not forked yet too."""
        unborn = range(len(request.sequences), request.params.n)
        deltas = [self._last(request.sequences[0], choice, reason, error) for choice in unborn]
        for sequence in request.sequences:
            if not sequence.state.finished:
                self._end(sequence, reason)
                deltas.append(self._last(sequence, sequence.choice, reason, error))
        return deltas

    def _last(self, sequence: Sequence, choice: int, reason: FinishReason, error: str | None) -> Addressed:
        front, request_id = sequence.request.key
        facts = sequence.facts(self.clock())
        return front, Delta(request_id, choice, (), finish_reason=reason, error=error, facts=facts)


def _whole(step: StepInput, output: StepOutput) -> _Result:
    return _Result(
        list(output.tokens),
        list(output.valid),
        list(output.logprobs),
        list(output.prompt_logprobs),
        [None] * len(step.seats),
    )


def _failed(step: StepInput, error: str) -> _Result:
    """The numbers mean nothing, but keep later ones in their places."""
    count = len(step.sample_seats)
    return _Result([0] * count, [False] * count, [None] * count, [()] * len(step.seats), [error] * len(step.seats))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _wait(result: Result) -> None:
    """Whatever comes of it."""
    with suppress(Exception):
        result.result()
