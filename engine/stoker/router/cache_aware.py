"""The policy `cacheAware`: the engine, or the pair of engines, with the lowest predicted cost in seconds.

`pairs` has the formulas. Rates and gaps are the engine's own measurements. The router's own requests count at once,
because an engine reports them later; what it reports is used while it is young. Affinity is thus priced in seconds: a
cached beginning draws a request only as far as the time that it saves.

Owned by `Backends`. Decides from values alone; knows neither connections nor time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import add
from typing import TypeVar

from stoker.router.load import Load, SharedStore
from stoker.router.pairs import SPLIT_GAIN, Pair, PairPolicy, Place, cheaper_than, cheapest_split, prompt_costs
from stoker.router.prefix_index import PIECE_BYTES, PrefixIndex, Slots
from stoker.router.standing import STREAM_WEIGHT, TOKENS_PER_S, Standing
from stoker.router.stored_prefixes import StoredPrefixes, name_of
from stoker.router.work import BYTES_PER_TOKEN, Work

ALIKE = 1.05
"""Costs within this factor count as equal: the backends take turns."""
MAX_SESSIONS = 1 << 16
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN


C = TypeVar("C", bound=Place)


class CacheAware(PairPolicy):
    """Remembers which backend got which beginnings and sessions."""

    def __init__(self, index: PrefixIndex | None = None, *, max_sessions: int = MAX_SESSIONS) -> None:
        self.max_sessions = max_sessions
        self.index = index or PrefixIndex()
        self.slots = Slots()
        self.stored = StoredPrefixes()
        self._sessions: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Slot and prompt tokens of a session's last request."""

    def __call__(self, ready: Sequence[C], turn: int, work: Work) -> C:
        """Choose the engine that serves a request alone, and note that it gets the request."""
        pair = self._choose(ready, (), turn, work)
        self.note(work, pair)
        return pair.answers

    def pair(self, ready: Sequence[C], helpers: Sequence[C], turn: int, work: Work) -> Pair[C]:
        """Choose who answers, out of `ready`, and who computes the prompt."""
        return self._choose(ready, helpers, turn, work)

    def _choose(self, ready: Sequence[C], helpers: Sequence[C], turn: int, work: Work) -> Pair[C]:
        able, standings, rates = reporting(ready)
        rate = sum(rates) / len(rates) if rates else TOKENS_PER_S
        cached, stored = self.cached_tokens(work), self.stored.depths(work.chain)
        uncached = self._missing(able, cached, stored, work.tokens, rate)
        costs = prompt_costs(standings, uncached, rate)
        answering = [one.answering_s for one in standings]
        whole = list(map(add, costs, answering))
        least = min(whole)
        limit = least * ALIKE
        best = [number for number, cost in enumerate(whole) if cost <= limit]
        chosen = best[turn % len(best)]
        alone = Pair(able[chosen], None, uncached[chosen])
        if not helpers:
            return alone
        others: tuple[Sequence[C], Sequence[int]] = able, uncached
        if helpers is not ready:
            standings = [one.standing for one in helpers]
            others = helpers, self._missing(helpers, cached, stored, work.tokens, rate)
            costs = prompt_costs(standings, others[1], rate)
        lowest, least_answering = least / SPLIT_GAIN, min(answering)
        if least_answering + min(costs) >= lowest:
            return alone
        helping = [cost + one.helping_s for cost, one in zip(costs, standings, strict=True)]
        options = cheaper_than(lowest, least_answering, helping, *others)
        answers = cheaper_than(lowest, min(helping), answering, able, uncached)
        return cheapest_split(answers, options, turn, rate, least) or alone

    def _missing(
        self, places: Sequence[C], cached: dict[int, int], stored: Mapping[int, int], tokens: int, rate: float
    ) -> list[int]:
        """Tokens of a prompt that each engine would have to compute, or as many as it computes while it loads them."""
        uncached = self._uncached(places, cached, tokens)
        return self._loading([one.load for one in places], uncached, stored, tokens, rate) if stored else uncached

    def _uncached(self, places: Sequence[C], cached: dict[int, int], tokens: int) -> list[int]:
        """Tokens of a prompt that each engine would have to compute."""
        if not cached:
            return [tokens] * len(places)
        get = self.slots.named(cached).get
        return [tokens - get(one.identity, 0) for one in places]

    def _loading(
        self, loads: Sequence[Load | None], uncached: Sequence[int], stored: Mapping[int, int], tokens: int, rate: float
    ) -> list[int]:
        """Tokens to compute at each engine, where those that it would load from its store count by the time of that."""
        number = self.stored.slots.number
        counted = []
        for load, missing in zip(loads, uncached, strict=True):
            if load is not None and load.store is not None:
                behind = max(tokens - stored.get(number(load.store.name), 0) * PIECE_TOKENS, 0)
                missing = loading_tokens(missing, load, load.store, behind, rate)
            counted.append(missing)
        return counted

    def reported(self, place: Place, load: Load) -> None:
        """Take what an engine announces of its store."""
        if load.store is not None:
            self.stored.reported(place.identity, load.store)

    def name_of(self, work: Work) -> str:
        """The name of the request's beginning for engines with a store; empty where none has one."""
        return name_of(work.chain) if work.chain and self.stored.index is not None else ""

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
                number = self.slots.number(one.identity)
                self.slots.used(one.identity)
                self.index.add(work.chain, number)
        self.stored.sent(work.chain)
        if work.session:
            self._sessions[work.session] = self.slots.number(pair.answers.identity), work.tokens
            self._sessions.move_to_end(work.session)
            if len(self._sessions) > self.max_sessions:
                self._sessions.popitem(last=False)


def reporting(ready: Sequence[C]) -> tuple[Sequence[C], list[Standing], list[float]]:
    """Return the engines that are not silent, or all where all are, with their standings and measured rates."""
    standings = [one.standing for one in ready]
    known = [one.rate for one in standings]
    rates = list(filter(None, known))
    if len(rates) == len(known):
        return ready, standings, rates  # an engine with a young report is not silent
    heard = [(one, seen) for one, seen in zip(ready, standings, strict=True) if seen.rate is not None or not one.silent]
    able, standings = ([one for one, _ in heard], [seen for _, seen in heard]) if heard else (ready, standings)
    return able, standings, rates


def loading_tokens(missing: int, load: Load, store: SharedStore, behind: int, rate: float) -> int:
    """Tokens to compute, the loaded ones counted as those that the engine would compute in the time of loading them.

    An engine loads only what it cannot compute faster.

    Args:
        missing: tokens of the prompt that its cache lacks.
        behind: tokens of the prompt that are not in the store.
        rate: prompt tokens per second of an engine that has not measured its own.
    """
    loaded = missing - behind
    if loaded <= 0 or not store.readable:
        return missing
    share = 1 + load.decoding * STREAM_WEIGHT  # what decodes slows a prefill, not a load
    return behind + min(loaded, int(store.load_s(loaded) * (load.prefill_tokens_per_s or rate) / share))
