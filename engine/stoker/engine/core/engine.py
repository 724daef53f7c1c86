"""Continuous batching: requests in, deltas out, one step at a time. Owns the requests; called by one thread."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from stoker.engine.core.blocks import BlockAudit
from stoker.engine.core.build_step import build_step_input
from stoker.engine.core.cache_event_publisher import CacheEventPublisher
from stoker.engine.core.deltas import Addressed, final_delta, first_or_final_delta, invalid_delta
from stoker.engine.core.expert_stats import expert_stats
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.host_tier import HostTier
from stoker.engine.core.messages import Delta, FinishReason, RequestProgress
from stoker.engine.core.request import Begun, Request, RequestKey, Sequence
from stoker.engine.core.request_check import ModelLimits, check_prompt, check_resumed, constraint_of
from stoker.engine.core.schedule import Chunk, Schedule
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.stats import STEP_TOKENS, Stats
from stoker.engine.core.step_clock import StepClock
from stoker.engine.core.step_retry import StepOutcome, SubmittedStep, retry_step
from stoker.engine.core.stored_beginnings import StoredBeginnings
from stoker.engine.core.timeline import NO_TIMELINE, Timeline
from stoker.engine.core.token_rate import TokenCounts, TokenRate
from stoker.engine.errors import ExecutorLost, RequestRefused
from stoker.engine.execution.executor import Executor, SharedSteps, duration_of, is_computed
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.sampling import SamplingParams
from stoker.model.hosted_experts import HostedExperts

TIER_WAIT_S = 0.02
"""Longest wait for the host tier while nothing else is to be done."""


class LLMEngine:
    """Continuous batching over one executor.

    `add_request` queues, `step` computes once and returns new deltas, `abort_request` and `finish_choice` end requests
    at any time. Request ids belong to a front: equal ids of two fronts are two requests.

    With `overlap` the host stays one step ahead of the device: `step` schedules and submits the next step before it
    reads the output of the one before. A sequence whose end only that output shows has computed one token too many; it
    is discarded. Over the stages of a pipeline several steps are in flight (`step_flight`).
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: ModelLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlap: bool = False,
        grammars: GrammarCompiler | None = None,
        num_devices: int = 1,
    ) -> None:
        """`grammars`: compiles structured output; without it such requests are refused."""
        self.num_devices = num_devices
        self.hosted_experts: Seq[HostedExperts] = ()
        """The leader's layers whose experts are in main memory."""
        self._token_rate = TokenRate()
        self.executor, self.scheduler, self.limits, self.clock = executor, scheduler, limits, clock
        self.overlap, self.grammars = overlap, grammars
        self.requests: dict[RequestKey, Request] = {}
        self.num_steps = 0
        self.progressed_s = clock()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.num_refused: Counter[str] = Counter()
        self.step_tokens = [0] * (len(STEP_TOKENS) + 1)
        """Steps by their number of tokens."""
        self.num_step_tokens = 0
        self.num_audits = 0
        self.num_leaked_blocks = 0
        self.before_step: Callable[[int], None] = lambda _: None
        """Called with the number of tokens of each step, before it is computed."""
        self.step_clock = StepClock()
        self.busy_s = 0.0
        """Time in which a step was being computed."""
        self._device_free_s = 0.0
        """When the device had computed the last step that was collected, and so began the next."""
        self.timeline: Timeline = NO_TIMELINE
        self.cache_events: CacheEventPublisher | None = None
        """Tells subscribers what the prefix cache holds."""
        self.shared_steps: SharedSteps | None = None
        """Steps that data-parallel ranks compute together; None where this rank computes its own alone."""
        self.beginnings: StoredBeginnings | None = None
        """Tells routers what is in the store; None without one."""
        self._arrivals = 0
        self._submitted: deque[SubmittedStep] = deque()

    def add_request(
        self,
        request_id: str,
        prompt_tokens: Seq[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        place: int = 0,
        arrival_s: float | None = None,
        front: str = "",
        resumed: Seq[tuple[int, ...] | None] = (),
        begun: Begun | None = None,
    ) -> None:
        """Queue a request; a missing seed is drawn here. `place` and `resumed` are explained at `AddRequest`.

        `begun`: of one that `check_request` has accepted before; it is not refused because the queue is full.

        Raises:
            RequestRefused: names the field, the value and what is allowed.
        """
        try:
            max_tokens = self._check((front, request_id), prompt_tokens, params, queues=begun is None)
            check_resumed(self.limits, params, resumed, max_tokens)
            constraint = constraint_of(params, self.limits, self.grammars)
        except RequestRefused as refused:
            self.num_refused[refused.kind] += 1
            raise
        now_s = self.clock()
        request = Request(
            key=(front, request_id),
            prompt=tuple(prompt_tokens),
            params=params if params.seed is not None else params.with_seed(secrets.randbits(63)),
            max_tokens=max_tokens,
            stop_tokens=self.limits.stop_tokens(params),
            arrival=self._arrivals,
            arrival_s=now_s if arrival_s is None else arrival_s,
            priority=priority,
            place=place,
            constraint=constraint,
            resumed=tuple(resumed),
        )
        if not self.has_unfinished:
            self.progressed_s = now_s  # before it there was no work
        self._arrivals += 1
        self.requests[request.key] = request
        if begun is not None:
            request.begin(begun)
        self.timeline.queued(request_id)
        self.scheduler.add(request)

    def check_request(
        self, request_id: str, prompt_tokens: Seq[int], params: SamplingParams, *, front: str = ""
    ) -> None:
        """Refuse what `add_request` would refuse now. Raises RequestRefused, counted."""
        try:
            self._check((front, request_id), prompt_tokens, params)
            constraint_of(params, self.limits, self.grammars)
        except RequestRefused as refused:
            self.num_refused[refused.kind] += 1
            raise

    def withdraw(self, request_id: str, *, front: str) -> None:
        """End a request without deltas, because another engine goes on with it; it is not counted as finished."""
        request = self.requests.pop((front, request_id), None)
        for sequence in request.sequences if request is not None else ():
            if not sequence.state.finished:
                self.scheduler.end(sequence, "abort")
                self.timeline.ended(sequence)

    def abort_request(self, request_id: str, *, front: str = "") -> list[Addressed]:
        """End every choice, waiting or running, and return their last deltas; none for a request that has ended."""
        request = self.requests.get((front, request_id))
        return [] if request is None else self._finish_request(request, "abort", None)

    def finish_choice(self, request_id: str, choice: int, *, front: str = "") -> None:
        """End a choice as a success, because a stop text was found in it. Harmless for one that has ended."""
        request = self.requests.get((front, request_id))
        for sequence in request.sequences if request is not None else ():
            if sequence.choice == choice and not sequence.state.finished:
                self._finish_sequence(sequence, "stop")

    def end_everything(self, reason: FinishReason, error: str | None = None) -> list[Addressed]:
        """End all requests and return their last deltas."""
        return [
            delta for request in list(self.requests.values()) for delta in self._finish_request(request, reason, error)
        ]

    def close(self) -> None:
        """Release processes, threads and memory. May be called twice."""
        if self.tier is not None:
            self.tier.close()
        self.executor.close()
        if self.cache_events is not None:
            self.cache_events.close()
        self.timeline.close()
        if self.grammars is not None:
            self.grammars.close()

    @property
    def tier(self) -> HostTier | None:
        return self.scheduler.tier

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def open_until_s(self) -> float:
        """Time until which the next step may be left to requests that arrive; the device is busy until then."""
        if not self._submitted or not self.scheduler.takes_more or self.scheduler.flight.stages > 1:
            return 0.0
        last = self._submitted[-1]
        return self.step_clock.open_until(last.size, self._device_free_s)

    def step(self) -> list[Addressed]:
        """Schedule and submit one step, collect the oldest: one new token for every sequence whose prompt is
        computed."""
        self.timeline.mark(self.num_steps, "begun")
        self.scheduler.take_up_transfers()
        schedule = self.scheduler.schedule(self.clock())
        self.timeline.mark(self.num_steps, "planned")
        if schedule.chunks:
            self._begin_step(schedule.num_tokens)
            self._submitted.append(self._submit(schedule))
        deltas: list[Addressed] = []
        for _ in range(self._num_due(bool(schedule.chunks))):
            self._collect(self._submitted.popleft(), deltas)
        if self.cache_events is not None:
            self.cache_events.publish()
        if self.tier is not None and not schedule.chunks and self.has_unfinished and not deltas:
            self.tier.wait(TIER_WAIT_S)
        return deltas

    def _num_due(self, goes_on: bool) -> int:
        """Number of submitted steps to collect now. Where no step could be scheduled, the oldest one may free some
        sequence."""
        submitted = len(self._submitted)
        if goes_on:
            return max(submitted - (self.scheduler.flight.stages - 1 + self.overlap), 0)
        return min(submitted, 1)

    def rest(self) -> None:
        """Go on with the tiers' transfers while no request is open."""
        if self.cache_events is not None:
            self.cache_events.publish()
        if self.tier is not None:
            self.scheduler.take_up_transfers()
            self.tier.spill()

    def progress(self, request_id: str, *, front: str = "") -> RequestProgress | None:
        """How far a request is; None for one that has ended."""
        request = self.requests.get((front, request_id))
        return None if request is None else request.progress

    @property
    def num_unfinished(self) -> int:
        """Number of requests of which some choice has not ended, waiting or running."""
        return len(self.requests)

    def stats(self) -> Stats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        now_s = self.clock()
        counts = TokenCounts(now_s, self.num_prompt_tokens, self.num_generated_tokens)
        prompt_rate, generation_rate = self._token_rate.record(counts)
        return Stats(
            time_s=now_s,
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
            step_tokens=tuple(self.step_tokens),
            step_tokens_sum=self.num_step_tokens,
            block_audits=self.num_audits,
            leaked_blocks=self.num_leaked_blocks,
            prompt_tokens_per_s=prompt_rate,
            generation_tokens_per_s=generation_rate,
            num_devices=self.num_devices,
            busy_s=self.busy_s,
            ranks=self.executor.rank_states(),
            host=self.tier.stats() if self.tier is not None else None,
            queue_s=dict(scheduler.queue_s.counts),
            classes=scheduler.classes.stats(scheduler.waiting, scheduler.running),
            disk=self.tier.below("disk") if self.tier is not None else None,
            store=self.tier.below("store") if self.tier is not None else None,
            shared_store=self.beginnings.stats() if self.beginnings is not None else None,
            experts=expert_stats(self.hosted_experts),
        )

    def audit(self) -> BlockAudit:
        """Count blocks and seats anew, between two steps. Gives leaked blocks back; the caller handles faults."""
        audit = self.scheduler.audit()
        self.num_audits += 1
        if audit.leaked:
            self.num_leaked_blocks += len(audit.leaked)
            self.scheduler.repair(audit)
        return audit

    def _check(self, key: RequestKey, prompt: Seq[int], params: SamplingParams, *, queues: bool = True) -> int:
        """Check a request and return its largest number of output tokens. Raises RequestRefused."""
        if key in self.requests:
            raise RequestRefused("invalid", f"request_id {key[1]!r} is in use", "request_id")
        max_tokens = check_prompt(self.limits, prompt, params)
        self.scheduler.check(len(prompt), max_tokens, params.n, queues=queues)
        return max_tokens

    # Computing.

    def _begin_step(self, num_tokens: int) -> None:
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.num_step_tokens += num_tokens
        self.before_step(num_tokens)

    def _submit(self, schedule: Schedule) -> SubmittedStep:
        number = self.num_steps
        step = build_step_input(number, schedule, self.scheduler.blocks)
        if self.tier is not None:
            self.tier.fence(step)
        self.num_steps += 1
        self.timeline.mark(number, "built")
        asked_s = self.clock()
        pending = self.executor.submit(step)
        submitted_s = asked_s if is_computed(pending) else self.clock()
        self.timeline.mark(number, "submitted")
        return SubmittedStep(schedule, step, pending, submitted_s)

    def _outcome(self, submitted: SubmittedStep) -> StepOutcome:
        """Wait for a step. One that failed is computed again in parts."""
        try:
            return submitted.outcome()
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever one request does to a step must not reach the others
            return retry_step(self.executor, submitted, self._submitted, error)

    def _collect(self, submitted: SubmittedStep, deltas: list[Addressed]) -> None:
        """Read one step's output into its sequences."""
        step = submitted.step.number
        self.timeline.mark(step, "waiting")
        output, errors, gone = self._outcome(submitted)
        self.timeline.mark(step, "waited")
        self._note_end(submitted)
        tokens, valid, logprobs = output.tokens, output.valid, output.logprobs
        self.progressed_s = self.clock()
        sample = 0
        for index, chunk in enumerate(submitted.schedule.chunks):
            end = sample + len(chunk.samples)
            if index in errors:
                deltas += self._finish_request(chunk.sequence.request, "error", errors[index])
            else:
                if not chunk.samples or any(valid[sample:end]):
                    self._commit_chunk(chunk, output.prompt_logprobs[index])  # never what is not finite
                for number, sequence in enumerate(chunk.samples, sample):
                    if not sequence.state.finished and number not in gone:
                        self._append_token(sequence, tokens[number], valid[number], logprobs[number], deltas)
            sample = end
        self.timeline.taken(step, submitted.schedule, submitted.pending)

    def _note_end(self, submitted: SubmittedStep) -> None:
        now_s = self.clock()
        began_s = max(self._device_free_s, submitted.submitted_s)
        has_prompts, num_tokens = submitted.size
        if self.tier is not None and has_prompts:
            self.tier.costs.prefill.record(num_tokens, now_s - began_s)
        duration_s = duration_of(submitted.pending)
        if duration_s is not None:
            self.step_clock.record(submitted.size, duration_s)
        self.busy_s += max(now_s - began_s, 0.0)
        self._device_free_s = now_s

    # Collecting results.

    def _commit_chunk(self, chunk: Chunk, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Make a computed chunk findable and keep its prompt log-probabilities, which replace those before a
        preemption."""
        self.scheduler.complete(chunk)
        if prompt_logprobs and not chunk.is_outdated:
            chunk.sequence.prompt_logprobs[chunk.start + 1 :] = prompt_logprobs

    def _append_token(
        self, sequence: Sequence, token: int, valid: bool, logprobs: TokenLogprobs | None, deltas: list[Addressed]
    ) -> None:
        """Append one sampled token to its sequence; it may be the last."""
        if not valid:
            self._finish_sequence(sequence, "error")
            deltas.append(invalid_delta(sequence, self.clock()))
            return
        first = sequence.first_token_s is None
        reason = sequence.append(token, self.progressed_s)
        self.num_generated_tokens += 1
        if first or reason is not None:
            deltas.append(self._first_or_final_delta(sequence, token, logprobs, first, reason))
            return
        front, request_id = sequence.request.key
        scores = (logprobs,) if logprobs is not None else None
        deltas.append((front, Delta(request_id, sequence.choice, (token,), scores)))

    def _first_or_final_delta(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, first: bool, reason: FinishReason | None
    ) -> Addressed:
        """A delta with `facts`; the first of choice 0 also has the prompt's log-probabilities."""
        starts = first and sequence.choice == sequence.request.first_choice
        if starts:
            self.num_prompt_tokens += sequence.num_prompt
        if reason is not None:
            self._finish_sequence(sequence, reason)
        return first_or_final_delta(sequence, token, logprobs, reason, self.progressed_s, starts=starts)

    # Ending.

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.end(sequence, reason)
        self.num_finished[reason] += 1
        self.timeline.ended(sequence)
        if sequence.request.finished:
            del self.requests[sequence.request.key]

    def _finish_request(self, request: Request, reason: FinishReason, error: str | None) -> list[Addressed]:
        """End every choice that runs or has not forked yet, and return their last deltas."""
        unborn = range(len(request.sequences), request.params.n)
        deltas = [final_delta(request.sequences[0], choice, reason, error, self.clock()) for choice in unborn]
        for sequence in request.sequences:
            if not sequence.state.finished:
                self._finish_sequence(sequence, reason)
                deltas.append(final_delta(sequence, sequence.choice, reason, error, self.clock()))
        return deltas
