"""The scheduler: which sequences take part in the next step, with how many tokens. Owns queue and seats; no torch, no
rank.

The order is by class, then priority, then arrival, then choice; one request at a time that has waited too long goes
before all classes (`ageing`). Each step first gives one token to every sequence that decodes,
then fills the budget (`step_budget`) with chunks of prompts, then admits from the queue. A long prompt leaves a part of
the budget to much shorter ones (`short_prompts`). There are never more seats than tokens in the largest budget, so a
prompt in progress always advances.

A sequence that cannot grow takes blocks from lower-ranked ones. These are preempted: computed again later, with their
output kept, or loaded from the host tier (`host_tier`) where there is one. Without a lower-ranked one it pauses and
keeps its blocks. The first in rank can always grow, so some sequence always finishes. A step in which a sequence paused
or was preempted admits nothing, and admission needs room for the whole prompt and one more block per running sequence.
That keeps sequences from evicting each other in turn.

A step may be scheduled while the one before still runs. Its samples count as pending tokens, whose ids only the device
knows. A sequence that is preempted or ended meanwhile gives its blocks and its seat back at once, because steps run on
the device in the order in which they were scheduled. It is admitted again only when none of its tokens is pending.

Called by the engine, in the core's thread.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice

from stoker.engine.core.ageing import Ageing
from stoker.engine.core.awaited_blocks import WORTH_TOKENS, AwaitedBlocks
from stoker.engine.core.blocks import BlockAudit, BlockManager
from stoker.engine.core.class_counts import ClassCounts
from stoker.engine.core.host_tier import LOOK_AHEAD, HostTier
from stoker.engine.core.messages import FinishReason
from stoker.engine.core.request import AGED, Request, Sequence, State
from stoker.engine.core.schedule import Chunk, Schedule, TableChange
from stoker.engine.core.seat_faults import seat_faults
from stoker.engine.core.short_prompts import share, shorter
from stoker.engine.core.step_budget import StepBudget
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.errors import RequestRefused
from stoker.pod.histogram import Histogram


class Scheduler:
    """Queue and running set. `schedule` decides a step, `complete` follows when its tokens are in the cache."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_requests: int,
        max_queued_requests: int,
        chunk_tokens: int | None = None,
        aging_s: float = math.inf,
        budget: StepBudget | None = None,
        tier: HostTier | None = None,
        flight: StepFlight | None = None,
        worth_tokens: float = WORTH_TOKENS,
    ) -> None:
        """`aging_s`: time in the queue after which a request goes before all classes and priorities.

        `budget`: of a step's tokens, at most `max_batch_tokens`, which is the default.

        `flight`: of a pipeline's steps; default: one stage. `worth_tokens`: of `AwaitedBlocks`.
        """
        self.blocks, self.tier, self.flight = blocks, tier, flight or StepFlight()
        self.awaited = AwaitedBlocks(blocks, worth_tokens)
        self.max_batch_tokens = max_batch_tokens
        self.budget = budget or StepBudget(max_batch_tokens)
        self.chunk_tokens = min(chunk_tokens or max_batch_tokens, max_batch_tokens)
        self.num_seats = min(max_requests, max_batch_tokens)
        self.max_queued_requests = max_queued_requests
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ageing = Ageing(aging_s)
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.queue_s = Histogram()
        """Time from arrival to the first step, in seconds."""
        self.classes = ClassCounts()
        self._free_seats = list(range(self.num_seats - 1, -1, -1))
        self._reserved_seats = 0
        self._dirty: list[int] = []
        """Free blocks of failed sequences that are not cleared yet."""

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def takes_more(self) -> bool:
        """Whether a request that arrived now would take part in the next step."""
        return not self.waiting and len(self._free_seats) > self._reserved_seats

    def check(self, num_prompt: int, max_tokens: int, num_choices: int, *, queues: bool = True) -> None:
        """Refuse a request that could never run, or that does not fit the queue now, with the numbers.

        `queues`: False for one that was accepted before.
        """
        capacity = self.blocks.num_blocks * self.blocks.block_size
        if num_prompt + max_tokens - 1 > capacity:  # the last token has no keys
            raise RequestRefused(
                "too_long",
                f"{num_prompt} prompt tokens and {max_tokens} output tokens can never fit the cache of {capacity}"
                f" tokens ({self.blocks.num_blocks} blocks of {self.blocks.block_size})",
                "prompt",
            )
        if num_choices > self.num_seats:
            raise RequestRefused(
                "invalid", f"n must be at most {self.num_seats}, the sequences of one step, got {num_choices}", "n"
            )
        if queues and len(self.waiting) >= self.max_queued_requests:
            raise RequestRefused(
                "queue_full", f"{len(self.waiting)} requests wait, at most {self.max_queued_requests} may"
            )

    def add(self, request: Request) -> None:
        """Queue a new request. The caller has checked it."""
        for sequence in request.sequences:
            if not sequence.state.finished:
                self._wait(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, waiting or running. Harmless for one that has ended."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            if self.tier is not None:
                self.tier.leave(sequence)
        elif sequence.state is State.RUNNING:
            failed = reason == "error"
            freed = self._leave(sequence, forget=failed)
            self._dirty += freed if failed else []
        else:
            return
        sequence.end(reason)

    def schedule(self, now_s: float) -> Schedule:
        """Decide the next step; it is empty only when no sequence runs or waits, or all wait for the host tier or for
        steps in flight."""
        step = Schedule()
        self._let_age(now_s)
        self._make_room_for_priority(step)
        budget = self._step_tokens()
        if self._schedule_in_order(step, budget, now_s):
            self._admit(step, budget - step.num_tokens, now_s)
            if self.tier is not None:
                self.tier.look_ahead(islice(self.waiting, LOOK_AHEAD), self._growth())
        if self.tier is not None:
            self.tier.spill()
            self._dirty = self.tier.not_loading(self._dirty)
        if step.chunks:
            step.cleared, self._dirty = self._dirty, []
            self.flight.begin()
        return step

    def complete(self, chunk: Chunk) -> None:
        """Make the full blocks of a computed chunk findable for the prefix cache.

        A sequence that was preempted and admitted again meanwhile computes them anew, in other blocks.
        """
        end = chunk.start + chunk.length
        if chunk.is_outdated or not self.blocks.completes_block(chunk.start, end):
            return
        for sequence in chunk.samples or (chunk.sequence,):
            if sequence.state is State.RUNNING:
                self.blocks.commit(sequence, sequence.tokens, end)

    def audit(self) -> BlockAudit:
        """Count blocks and seats anew, between two steps: none may be missing or held twice."""
        audit = self.blocks.audit()
        tier_faults = self.tier.faults() if self.tier is not None else ()
        seats = seat_faults(self.running, self._free_seats, self._reserved_seats, self.num_seats)
        return replace(audit, faults=(*audit.faults, *seats, *tier_faults))

    def take_up_transfers(self) -> None:
        """Take up what the host tier has saved and loaded, between two steps."""
        if self.tier is not None:
            self._dirty += self.tier.poll()

    # Blocks that another engine fills.

    def grow_landing(self, owner: Hashable, num_blocks: int) -> bool:
        """Extend the owner's table by blocks that are about to be written whole. False: there are too few."""
        known = len(self.blocks.table(owner))
        if not self.blocks.grow(owner, num_blocks * self.blocks.block_size):
            return False
        new = set(self.blocks.table(owner)[known:])
        self._dirty = [block for block in self._dirty if block not in new]
        return True

    def close_landing(self, owner: Hashable) -> None:
        """Give the owner's blocks back. Those that can be found stay in the cache, the others are cleared."""
        self._dirty += self.blocks.release(owner)

    def repair(self, audit: BlockAudit) -> None:
        """Give leaked blocks back. They are cleared before they get an owner."""
        self._dirty += self.blocks.repair(audit)

    # Running sequences.

    def _step_tokens(self) -> int:
        """The budget of the next step."""
        if self.budget.mixed is None:
            return self.budget.most
        missing = [sequence.missing for sequence in self.running]
        waiting = sum(len(sequence.tokens) for sequence in islice(self.waiting, self.budget.most))
        return self.budget.tokens(missing.count(1), sum(count for count in missing if count > 1) + waiting)

    def _schedule_in_order(self, step: Schedule, budget: int, now_s: float) -> bool:
        """Schedule running sequences, those that decode first, and with a long prompt also short ones that wait. True
        if none had to pause or was preempted."""
        able = self.flight.able(self.running)
        short = self._much_shorter(able, budget)
        if not short:
            return self._schedule_running(step, able, budget)
        undisturbed = self._schedule_running(step, [one for one in able if one[1] == 1], budget)
        if undisturbed:
            undisturbed = self._let_pass(step, short, share(budget - step.num_tokens), now_s)
        done = {chunk.sequence for chunk in step.chunks}
        rest = [one for one in able if one[1] > 1 and one[0] not in done]
        return self._schedule_running(step, rest, budget - step.num_tokens) and undisturbed

    def _much_shorter(self, able: Seq[tuple[Sequence, int]], budget: int) -> list[Sequence]:
        """The sequences that go before the first prompt, where that does not end in this step."""
        prompts = [one for one in able if one[1] > 1]
        if not prompts or prompts[0][1] <= budget - (len(able) - len(prompts)):
            return []
        return shorter(*prompts[0], [one for one, _ in prompts[1:]], self.waiting)

    def _let_pass(self, step: Schedule, short: Seq[Sequence], budget: int, now_s: float) -> bool:
        """Schedule short prompts and admit those that wait, as far as they fit. True if no other sequence had to pause
        or was preempted."""
        undisturbed, computing = True, self.awaited.computing(self.running)
        for sequence in short:
            before = step.num_tokens
            if budget <= 0 or not undisturbed:
                break
            if sequence.state is State.RUNNING:
                undisturbed = self._schedule_running(step, [(sequence, sequence.missing)], budget)
            elif self._has_free_seat and not self.awaited.awaits(sequence, computing):
                self._begin(sequence, step, budget, now_s)
            budget -= step.num_tokens - before
        return undisturbed

    def _schedule_running(self, step: Schedule, able: Seq[tuple[Sequence, int]], budget: int) -> bool:
        """Schedule these sequences by at most so many tokens. True if none had to pause or was preempted."""
        undisturbed = True
        done = {chunk.sequence for chunk in step.chunks}
        for sequence, missing in able:
            if sequence.state is not State.RUNNING:
                undisturbed = False  # preempted by one before it
                continue
            length = missing if missing == 1 <= budget else min(missing, budget, self.chunk_tokens)
            if length == 0:
                break
            if sequence.num_computed + length > sequence.capacity and not self._secure(sequence, length, step, done):
                undisturbed = False
                continue
            done.add(sequence)
            self._take_part(sequence, length, length == missing, step)
            budget -= length
        return undisturbed

    def _secure(self, sequence: Sequence, length: int, step: Schedule, done: set[Sequence]) -> bool:
        """Give the sequence own, unshared blocks for the chunk, preempting lower-ranked ones. False: it must pause."""
        end = sequence.num_computed + length
        while True:
            shared = self.blocks.is_shared(sequence, sequence.num_computed)
            missing = self.blocks.blocks_for(end) - len(self.blocks.table(sequence)) + shared
            if missing <= self.blocks.num_available:
                break
            if self.tier is not None and self.tier.give_up_held():
                continue
            victim = self.running[-1]
            if victim is sequence or victim in done:
                return False
            self._preempt(victim, step)
        if shared:
            step.copies.append(self.blocks.make_writable(sequence, sequence.num_computed))
            written = self.blocks.blocks_for(sequence.num_computed + 1) - 1
            step.grown.append(TableChange(sequence, written, written + 1))
        known = len(self.blocks.table(sequence))
        grown = self.blocks.grow(sequence, end)
        assert grown, "there was room"
        held = len(self.blocks.table(sequence))
        if held > known:
            step.grown.append(TableChange(sequence, known, held))
        sequence.capacity = held * self.blocks.block_size
        return True

    def _take_part(self, sequence: Sequence, length: int, is_last: bool, step: Schedule) -> None:
        """Add the chunk to the step. `is_last`: it ends with the last token, known or pending, so a next one is
        sampled."""
        start = sequence.num_computed
        sequence.num_computed = start + length
        samples: tuple[Sequence, ...] = ()
        if is_last and sequence.num_seats == 1:
            samples = (sequence,)
            sequence.num_pending += 1
            self.flight.sampled(sequence)
        elif is_last:
            samples = (sequence, *self._fork(sequence, step))
            for sampled in samples:
                sampled.num_pending += 1
                self.flight.sampled(sampled)
        step.chunks.append(Chunk(sequence, start, length, samples, sequence.preemptions))

    def _fork(self, sequence: Sequence, step: Schedule) -> list[Sequence]:
        """Fork the other choices of a prompt that this step completes: same blocks, reserved seats."""
        self._reserved_seats -= sequence.num_seats - 1
        forks = sequence.request.fork()
        sequence.capacity = 0
        for fork in forks:
            fork.num_computed = sequence.num_computed
            self.blocks.fork(sequence, fork)
            self._sit(fork, step)
        return forks

    # Preemption.

    def _preempt(self, victim: Sequence, step: Schedule) -> None:
        if self.tier is not None:
            self.tier.swap_out(victim)
        self._leave(victim)
        victim.state = State.WAITING
        victim.num_computed = 0
        victim.preemptions += 1
        self.num_preemptions += 1
        self.classes.preempted(victim.request.place)
        self._wait(victim)
        step.preempted.append(victim)

    def _make_room_for_priority(self, step: Schedule) -> None:
        """Preempt running sequences, the last in rank first, for a waiting one of a higher class or priority. An aged
        one preempts none: it is the next to be admitted. Nor does one that awaits blocks."""
        if not self.waiting or self.waiting[0].num_pending or self.waiting[0].request.standing == AGED:
            return
        first = self.waiting[0]
        outranks = self.running and self.running[-1].request.standing > first.request.standing
        if not outranks or self.awaited.awaits(first, self.awaited.computing(self.running)):
            return
        while self.running and self.running[-1].request.standing > first.request.standing and not self._fits(first):
            self._preempt(self.running[-1], step)

    def _let_age(self, now_s: float) -> None:
        """Put the request whose turn has come before all others."""
        if request := self.ageing.turn(self.waiting, now_s):
            request.age()
            self.classes.aged(request.place)
            self.waiting.sort(key=_rank)
            self.running.sort(key=_rank)

    # Admission.

    def _admit(self, step: Schedule, budget: int, now_s: float) -> None:
        """Admit in order. A prompt that does not fit yet is not overtaken, so that long ones get their turn. One that
        awaits blocks of steps in flight is."""
        place, computing = 0, self.awaited.computing(self.running if self.waiting else ())
        while budget > 0 and self._has_free_seat:
            place = self.awaited.pass_over(self.waiting, place, computing)
            if place == len(self.waiting):
                return
            sequence = self.waiting[place]
            length = self._begin(sequence, step, budget, now_s)
            if not length:
                return
            computing += self.awaited.computing((sequence,))
            budget -= length

    @property
    def _has_free_seat(self) -> bool:
        return len(self._free_seats) > self._reserved_seats

    def _begin(self, sequence: Sequence, step: Schedule, budget: int, now_s: float) -> int:
        """Admit a sequence with at most so many tokens in this step. Returns how many; 0: it cannot begin yet."""
        if sequence in step.preempted or sequence.num_pending or not self._has_seats(sequence):
            return 0
        if self.tier is not None and self.tier.holds_back(sequence, self._growth()):
            return 0
        cached = self._give_blocks(sequence)
        if cached is None:
            return 0
        self.waiting.remove(sequence)
        if self.tier is not None:
            self.tier.leave(sequence)
        self._count_prefix(sequence, cached, now_s)
        sequence.num_computed = cached
        self._reserved_seats += sequence.num_seats - 1
        self._sit(sequence, step)
        missing = len(sequence.tokens) - cached
        length = min(missing, budget, self.chunk_tokens)
        self._take_part(sequence, length, length == missing, step)
        return length

    def _give_blocks(self, sequence: Sequence) -> int | None:
        """Give it blocks for all of its tokens, and return how many are computed; None where there are too few."""
        reads = sequence.request.params.prompt_logprobs is None
        while True:
            cached = self.blocks.admit(
                sequence, sequence.tokens, read_cache=reads, keep_free=self._growth(), salt=sequence.request.salt
            )
            if cached is not None or self.running or self.tier is None or not self.tier.give_up_held():
                return cached

    def _fits(self, sequence: Sequence) -> bool:
        """Whether it fits without the prefix cache."""
        needed = self.blocks.blocks_for(len(sequence.tokens))
        if self.tier is not None:
            needed -= self.tier.num_held(sequence)
        return self._has_seats(sequence) and self.blocks.num_available - needed >= self._growth()

    def _has_seats(self, sequence: Sequence) -> bool:
        return len(self._free_seats) - self._reserved_seats >= sequence.num_seats

    def _growth(self) -> int:
        """Blocks that running sequences need next; 0 for the first sequence, which may take the whole cache."""
        return len(self.running)

    def _count_prefix(self, sequence: Sequence, cached: int, now_s: float) -> None:
        request = sequence.request
        if request.scheduled_s is None:
            request.scheduled_s = now_s
            queued_s = max(now_s - request.arrival_s, 0.0)
            self.queue_s.add(queued_s)
            self.classes.began(request.place, queued_s)
            request.cached_tokens = min(cached, sequence.num_prompt)  # a resumed one has output, too
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += request.cached_tokens

    # Seats and queues.

    def _wait(self, sequence: Sequence) -> None:
        self.ageing.waits(sequence)
        insort(self.waiting, sequence, key=_rank)

    def _sit(self, sequence: Sequence, step: Schedule) -> None:
        sequence.seat = self._free_seats.pop()
        sequence.capacity = 0
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)
        step.opened.append(sequence)

    def _leave(self, sequence: Sequence, *, forget: bool = False) -> list[int]:
        assert sequence.seat is not None
        self._reserved_seats -= sequence.num_seats - 1
        self._free_seats.append(sequence.seat)
        sequence.seat = None
        self.running.remove(sequence)
        return self.blocks.release(sequence, forget=forget)


def _rank(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.rank
