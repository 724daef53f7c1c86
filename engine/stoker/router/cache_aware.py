"""The policy `cacheAware`: the backend with the lowest predicted cost in seconds.

cost = (tokens that wait there + tokens of the prompt that it has not cached) / its prefill rate
       + pending requests x the gap between its tokens

Rates and gaps are the engine's own measurements. The router's own requests count at once, because an engine reports
them later; what it reports is used while it is young. Affinity is thus priced in seconds: a cached beginning draws a
request only as far as the time that it saves.

Owned by `Backends`. Decides from values alone; knows neither connections nor time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from stoker.router.load import Load
from stoker.router.prefix_index import PIECE_BYTES, PrefixIndex, Slots
from stoker.router.work import BYTES_PER_TOKEN, Work

TOKENS_PER_S = 5000.0
"""Prefill rate of a backend while none has been measured."""
GAP_S = 0.02
"""Gap between two tokens while none has been measured."""
ALIKE = 1.05
"""Costs within this factor count as equal: the backends take turns."""
MAX_SESSIONS = 1 << 16
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN


class Candidate(Protocol):
    """The part of a backend that the policy uses."""

    @property
    def identity(self) -> tuple[str, str]:
        """Pod uid and epoch."""
        ...

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...

    @property
    def unstarted_tokens(self) -> int:
        """Prompt tokens of this router's requests without a first byte."""
        ...

    @property
    def load(self) -> Load | None:
        """The engine's newest report, while it is young; None without one."""
        ...

    @property
    def silent(self) -> bool:
        """Whether an engine that reported has not done so for long."""
        ...


C = TypeVar("C", bound=Candidate)


class CacheAware:
    """Remembers which backend got which beginnings and sessions."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex()
        self.slots = Slots()
        self._sessions: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Slot and prompt tokens of a session's last request."""

    def __call__(self, ready: Sequence[C], turn: int, work: Work) -> C:
        """Choose a backend and note that it gets the request."""
        able = [one for one in ready if not one.silent] or ready
        cached = self.cached_tokens(work)
        slots = [self.slots.number(one.identity) for one in able]
        loads = [one.load for one in able]
        rate = _mean([load.prefill_tokens_per_s for load in loads if load is not None], TOKENS_PER_S)
        costs = [
            cost_s(one, load, work.tokens - cached.get(slot, 0), rate)
            for one, load, slot in zip(able, loads, slots, strict=True)
        ]
        limit = min(costs) * ALIKE
        best = [number for number, cost in enumerate(costs) if cost <= limit]
        chosen = best[turn % len(best)]
        self.slots.used(able[chosen].identity)
        self._note(work, slots[chosen])
        return able[chosen]

    def cached_tokens(self, work: Work) -> dict[int, int]:
        """Tokens of the prompt that each backend has had, by slot, about."""
        depths = self.index.depths(work.chain)
        cached = {slot: min(depth * PIECE_TOKENS, work.tokens) for slot, depth in depths.items()}
        slot, tokens = self._sessions.get(work.session, (0, 0))
        if slot:
            cached[slot] = max(cached.get(slot, 0), min(tokens, work.tokens))
        return cached

    def _note(self, work: Work, slot: int) -> None:
        self.index.add(work.chain, slot)
        if work.session:
            self._sessions[work.session] = slot, work.tokens
            self._sessions.move_to_end(work.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)


def cost_s(backend: Candidate, load: Load | None, uncached: int, default_rate: float = TOKENS_PER_S) -> float:
    """Predict what a request with `uncached` tokens to compute costs at a backend, in seconds.

    `load`: its report, while it is young; `default_rate`: of a backend that has not measured its own.
    """
    tokens, pending, rate, gap = backend.unstarted_tokens, backend.pending, default_rate, GAP_S
    if load is not None:
        tokens = load.waiting_tokens if load.waiting_tokens > tokens else tokens
        pending = load.requests if load.requests > pending else pending
        rate, gap = load.prefill_tokens_per_s or rate, load.gap_s or gap
    return (tokens + uncached) / rate + pending * gap if uncached > 0 else tokens / rate + pending * gap


def _mean(rates: Sequence[float | None], default: float) -> float:
    known = [rate for rate in rates if rate]
    return sum(known) / len(known) if known else default
