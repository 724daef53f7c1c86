"""The policy `cacheAware`: the engine, or the pair of engines, with the lowest predicted cost in seconds.

`pairs` has the formulas. Rates and gaps are the engine's own measurements. The router's own requests count at once,
because an engine reports them later; what it reports is used while it is young. Affinity is thus priced in seconds: a
cached beginning draws a request only as far as the time that it saves.

Owned by `Backends`. Decides from values alone; knows neither connections nor time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from stoker.router.load import Load
from stoker.router.pairs import (
    AGAINST_ROLE_S,
    GAP_S,
    STREAM_WEIGHT,
    TOKENS_PER_S,
    Helpers,
    Pair,
    PairPolicy,
    Place,
    cheapest_split,
    measured,
)
from stoker.router.prefix_index import PIECE_BYTES, PrefixIndex, Slots
from stoker.router.work import BYTES_PER_TOKEN, Work

ALIKE = 1.05
"""Costs within this factor count as equal: the backends take turns."""
MAX_SESSIONS = 1 << 16
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN


C = TypeVar("C", bound=Place)


class CacheAware(PairPolicy):
    """Remembers which backend got which beginnings and sessions."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex()
        self.slots = Slots()
        self._sessions: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Slot and prompt tokens of a session's last request."""

    def __call__(self, ready: Sequence[C], turn: int, work: Work) -> C:
        """Choose the engine that serves a request alone, and note that it gets the request."""
        pair = self._choose(ready, (), turn, work)
        self.note(work, pair)
        return pair.answers

    def pair(self, ready: Sequence[C], helpers: Sequence[C], turn: int, work: Work) -> Pair[C]:
        """Choose who answers, out of `ready`, and who computes the prompt."""
        begin = turn % len(helpers) if helpers else 0
        return self._choose(ready, [*helpers[begin:], *helpers[:begin]], turn, work)

    def _choose(self, ready: Sequence[C], helpers: Sequence[C], turn: int, work: Work) -> Pair[C]:
        able = [one for one in ready if not one.silent] or ready
        cached = self.cached_tokens(work)
        loads = [one.load for one in able]
        rate = _mean([load.prefill_tokens_per_s for load in loads if load is not None], TOKENS_PER_S)
        uncached = [work.tokens - cached.get(self.slots.number(one.identity), 0) for one in able]
        costs = [cost_s(*each, rate) for each in zip(able, loads, uncached, strict=True)]
        limit = min(costs) * ALIKE
        best = [number for number, cost in enumerate(costs) if cost <= limit]
        chosen = best[turn % len(best)]
        pair = Pair(able[chosen], None, uncached[chosen])
        if helpers:
            names = [one.identity for one in able]
            missing = dict(zip(names, uncached, strict=True))
            for one in helpers:
                if one.identity not in missing:
                    missing[one.identity] = work.tokens - cached.get(self.slots.number(one.identity), 0)
            seen = [measured(one, load, rate) for one, load in zip(able, loads, strict=True)]
            known = Helpers(helpers, missing, rate, dict(zip(names, seen, strict=True)))
            pair = cheapest_split(zip(able, seen, uncached, strict=True), known, work.tokens, min(costs)) or pair
        return pair

    def cached_tokens(self, work: Work) -> dict[int, int]:
        """Tokens of the prompt that each backend has had, by slot, about."""
        depths = self.index.depths(work.chain)
        cached = {slot: min(depth * PIECE_TOKENS, work.tokens) for slot, depth in depths.items()}
        slot, tokens = self._sessions.get(work.session, (0, 0))
        if slot:
            cached[slot] = max(cached.get(slot, 0), min(tokens, work.tokens))
        return cached

    def note(self, work: Work, pair: Pair[C]) -> None:
        """Remember that the engines of a pair get the request."""
        for one in (pair.answers, pair.helper):
            if one is not None:
                self.slots.used(one.identity)
                self.index.add(work.chain, self.slots.number(one.identity))
        if work.session:
            self._sessions[work.session] = self.slots.number(pair.answers.identity), work.tokens
            self._sessions.move_to_end(work.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)


def cost_s(backend: Place, load: Load | None, uncached: int, default_rate: float = TOKENS_PER_S) -> float:
    """Predict what a request with `uncached` tokens to compute costs at an engine alone, in seconds.

    The fast twin of `pairs.whole_s`: a choice among many engines runs it for each.

    `load`: its report, while it is young; `default_rate`: of a backend that has not measured its own.
    """
    tokens, pending, rate, gap = backend.unstarted_tokens, backend.pending, default_rate, GAP_S
    share = 1.0
    if load is not None:
        requests, waiting = load.requests, load.waiting_tokens
        tokens = waiting if waiting > tokens else tokens
        pending = requests if requests > pending else pending
        rate, gap = load.prefill_tokens_per_s or rate, load.gap_s or gap
        if requests > load.waiting:
            share += (requests - load.waiting) * STREAM_WEIGHT
    price = AGAINST_ROLE_S if backend.role == "prefill" else 0.0
    return (tokens + (uncached * share if uncached > 0 else 0.0)) / rate + pending * gap + price


def _mean(rates: Sequence[float | None], default: float) -> float:
    known = [rate for rate in rates if rate]
    return sum(known) / len(known) if known else default
