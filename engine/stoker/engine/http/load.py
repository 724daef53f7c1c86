"""The load of an engine as its front sees it, and the reports that routers follow at `GET /load`.

Counts change with each job of the front; rates are means of the last ones. Several fronts of an engine tell each other
their shares, so that each reports the load of all. Where an engine has several data ranks, each is counted by itself,
too. Owned by `Front`, changed by `Generation`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, NamedTuple

from stoker.engine.config import Role
from stoker.engine.core.messages import RequestFacts
from stoker.engine.core.prefill_rate import FEWEST_TOKENS, Prefill, PrefillRate, newest, rate_of
from stoker.engine.core.stats import SharedStoreStats, TransferStats
from stoker.engine.http.openai.sse import event
from stoker.pod.prompt_order import LOOK_AHEAD

REPORT_S = 0.1
"""Shortest time between two reports."""
QUIET_S = 0.5
"""Longest time between two reports."""
WEIGHT = 0.2
"""Of a new measurement in a mean."""


class LoadShare(NamedTuple):
    """One front's part of the load, or of that of one data rank."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    gap_s: float | None = None
    prefills: tuple[Prefill, ...] = ()
    """Its last prompts, in the order of their ends."""
    prompts: tuple[int, ...] = ()
    """Prompt tokens of the first of those that wait, in the order of arrival."""
    ranks: tuple[LoadShare, ...] = ()
    """The parts of each data rank, where there are several."""

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> LoadShare:
        """Read the list of its fields."""
        *fields, prefills, prompts, ranks = wire
        made = tuple(Prefill._make(one) for one in prefills), tuple(prompts), tuple(map(cls.from_wire, ranks))
        return cls._make((*fields, *made))


class JobLedger:
    """Open jobs of one front, or those of one data rank."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        """Prompt tokens of jobs without a first token."""
        self.running: set[str] = set()
        self.prefill_tokens_per_s: float | None = None
        """Mean of the last prompts, each by itself."""
        self.prefill_rate = PrefillRate()
        """Of all prompts in work together."""
        self.gap_s: float | None = None
        self._of_all: tuple[tuple[Prefill, ...], float | None] = (), None
        """The prompts of all fronts, and their rate."""

    def begin(self, name: str, prompt_tokens: int) -> None:
        """Count a job."""
        self.waiting[name] = prompt_tokens

    def end(self, name: str) -> None:
        """Count a job no longer."""
        self.waiting.pop(name, None)
        self.running.discard(name)

    def compute(self, name: str, facts: RequestFacts | None) -> bool:
        """Note that a job's prompt is computed; return whether it was not known."""
        if self.waiting.pop(name, None) is None:
            return False
        self.running.add(name)
        if facts is None or facts.helped or facts.scheduled_s is None or facts.first_token_s is None:
            return True
        tokens, seconds = facts.prompt_tokens - facts.cached_tokens, facts.first_token_s - facts.scheduled_s
        if tokens >= FEWEST_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / seconds)
            self.prefill_rate.computed(tokens, facts.scheduled_s, facts.first_token_s)
        return True

    def note_gap(self, seconds: float) -> None:
        """Note the time between two tokens of a sequence."""
        if seconds > 0:
            self.gap_s = _mean(self.gap_s, seconds)

    @property
    def share(self) -> LoadShare:
        """The present load."""
        return LoadShare(
            len(self.running), len(self.waiting), sum(self.waiting.values()), self.prefill_tokens_per_s, self.gap_s,
            tuple(self.prefill_rate.recent), tuple(islice(self.waiting.values(), LOOK_AHEAD)),
        )  # fmt: skip

    def counts(self, others: Sequence[LoadShare], helps: TransferStats | None) -> dict[str, Any]:
        """The present load of all fronts, with what is computed for other engines."""
        load = summed((self.share, *others))
        helping, waiting, tokens, rate = (
            (helps.helping, helps.helping_waiting, helps.helping_tokens, helps.prefill_tokens_per_s)
            if helps is not None
            else (0, 0, 0, None)
        )
        return {
            "requests": load.waiting + load.running + helping,
            "waiting": load.waiting + waiting,
            "waiting_tokens": load.waiting_tokens + tokens,
            "prompts": load.prompts,
            "prefill_tokens_per_s": load.prefill_tokens_per_s if rate is None else rate,
            "busy_tokens_per_s": self._busy_tokens_per_s(load.prefills) if others else self.prefill_rate.tokens_per_s,
            "gap_s": load.gap_s,
        }

    def _busy_tokens_per_s(self, prefills: tuple[Prefill, ...]) -> float | None:
        """The rate of all prompts together, by the last ones of all fronts."""
        if prefills != self._of_all[0]:
            self._of_all = prefills, rate_of(prefills)
        return self._of_all[1]


class LoadLedger(JobLedger):
    """Open jobs of one front, of all data ranks together and of each."""

    def __init__(
        self,
        role: Role = "colocated",
        transfer: Callable[[], TransferStats | None] = lambda: None,
        queue_s: Callable[[], Mapping[int, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        store: Callable[[], SharedStoreStats | None] = lambda: None,
        step_tokens: Callable[[], tuple[int, int | None]] = lambda: (0, None),
        num_ranks: int = 1,
        transfer_of: Callable[[int], TransferStats | None] = lambda _: None,
    ) -> None:
        """`transfer`: the newest report of the core on other engines; `queue_s`: that on times in its queue; `clock`:
        one that processes share; `store`: the core's newest report on the store that engines share; `step_tokens`:
        tokens of a full step, 0 while they are not known, and prompt tokens of one beside decodes (`ModelFacts`);
        `num_ranks`: data ranks; `transfer_of`: as `transfer`, of one of them."""
        super().__init__()
        self.role, self._transfer, self._queue_s, self._clock = role, transfer, queue_s, clock
        self._store, self._step_tokens, self._transfer_of = store, step_tokens, transfer_of
        self.epoch = uuid.uuid4().hex
        """This run of the engine."""
        self.others: Sequence[LoadShare] = ()
        """The newest shares of the engine's other fronts."""
        self.ranks = tuple(JobLedger() for _ in range(num_ranks if num_ranks > 1 else 0))
        """Of each data rank; empty where there is one."""

    @contextmanager
    def job(self, name: str, prompt_tokens: int, rank: int = 0) -> Iterator[None]:
        """Count a job of a data rank until it ends."""
        ledgers: Sequence[JobLedger] = (self, self.ranks[rank]) if self.ranks else (self,)
        for ledger in ledgers:
            ledger.begin(name, prompt_tokens)
        try:
            yield
        finally:
            for ledger in ledgers:
                ledger.end(name)

    def first_token(self, name: str, facts: RequestFacts | None) -> None:
        """Note that a job's prompt is computed; harmless when repeated."""
        if self.compute(name, facts):
            for rank in self.ranks:
                rank.compute(name, facts)

    def gap(self, seconds: float, rank: int = 0) -> None:
        """Note the time between two tokens of a sequence."""
        self.note_gap(seconds)
        if self.ranks:
            self.ranks[rank].note_gap(seconds)

    @property
    def share(self) -> LoadShare:
        """The present load of this front."""
        return super().share._replace(ranks=tuple(rank.share for rank in self.ranks))

    def report(self) -> dict[str, Any]:
        """The present load of all fronts, with what is computed for other engines; `GET /load` adds a number."""
        helps, store = self._transfer(), self._store()
        step, mixed = self._step_tokens()
        return {
            "epoch": self.epoch,
            **self.counts(self.others, helps),
            "step_tokens": step,
            "mixed_tokens": mixed,
            "role": self.role,
            "peer": peer_of(helps),
            "queue_s": dict(self._queue_s()),
            **({} if store is None else {"store": asdict(store)}),
            **({"ranks": list(map(self._rank_report, range(len(self.ranks))))} if self.ranks else {}),
        }

    def _rank_report(self, rank: int) -> dict[str, Any]:
        """The part of one data rank."""
        others = [front.ranks[rank] for front in self.others if front.ranks]
        return self.ranks[rank].counts(others, self._transfer_of(rank))

    async def reports(self, going_on: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yield reports as events until the engine takes no requests: on change, at most ten in a second.

        `seq` is a time in milliseconds. It grows from one stream to the next as well, also where another front sends
        it: a reader that comes back takes the first report for newer than its last.
        """
        seq, last, quiet_s = 0, None, 0.0
        while True:
            counts = self.report()
            if counts != last or quiet_s >= QUIET_S:
                seq = max(seq + 1, int(1000 * self._clock()))
                yield event({"seq": seq, **counts})
                last, quiet_s = counts, 0.0
            if not going_on():
                return
            await asyncio.sleep(REPORT_S)
            quiet_s += REPORT_S


def summed(shares: Sequence[LoadShare]) -> LoadShare:
    """The load of several fronts; rates are means over those that have measured one. Which of their prompts came first
    is not known."""
    return LoadShare(
        sum(one.running for one in shares),
        sum(one.waiting for one in shares),
        sum(one.waiting_tokens for one in shares),
        _average([one.prefill_tokens_per_s for one in shares]),
        _average([one.gap_s for one in shares]),
        newest(chain.from_iterable(one.prefills for one in shares)),
        tuple(islice(chain.from_iterable(one.prompts for one in shares), LOOK_AHEAD)),
    )


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def peer_of(transfer: TransferStats | None) -> dict[str, Any] | None:
    """What routers, and the operator, know of an engine as a peer of others; None without hand-over."""
    if transfer is None:
        return None
    fastest = max(transfer.rates.values(), default=None)
    return {
        "endpoint": transfer.endpoint,
        "epoch": transfer.epoch,
        "fingerprint": transfer.fingerprint,
        "block_size": transfer.block_size,
        "block_bytes": transfer.block_bytes,
        "transports": list(transfer.transports),
        "host_id": transfer.host_id,
        "zone_slots": transfer.zone_slots,
        "free_slots": transfer.free_slots,
        "handover_s": transfer.handover_s,
        "link_bytes_per_s": fastest,
        "receiving": transfer.receiving,
        "helping": transfer.helping,
        **({"copies": [copy._asdict() for copy in transfer.copies]} if transfer.copies else {}),
    }


def transfer_status(transfer: TransferStats | None) -> dict[str, Any] | None:
    """The `transfer` field of `/status`: the peer, with the transport in use, what was lost and what was refused."""
    peer = peer_of(transfer)
    if transfer is None or peer is None:
        return None
    used = max(transfer.bytes, key=lambda name: transfer.bytes[name], default=None)
    return peer | {
        "transport": used if used is not None and transfer.bytes[used] else None,
        "bytes_per_s": dict(transfer.rates),
        "unmet": transfer.unmet,
        "facts": dict(transfer.facts),
        "avoided": dict(transfer.avoided),
        "outcomes": dict(transfer.outcomes),
        "fallbacks": {reason: count for reason, count in transfer.fallbacks.items() if count},
        "helps": dict(transfer.helps),
        "refused_blocks": dict(transfer.refused),
    }


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
