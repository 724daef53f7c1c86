"""The choice of a pair: the engine that answers a request, and perhaps another one that computes its prompt.

Predicted seconds decide. `whole`: the engine computes the prompt itself. `split`: the helper computes the prompt and
streams its first tokens, the blocks travel, the answering engine takes over. A request is split only where that is
predicted to cost less than the cheapest engine alone, so idle engines never split.

    whole(E)    = (queue(E) + uncached(E)) / rate(E) + disturbance(E) + pending(E) x gap(E)
    split(D, P) = (queue(P) + uncached(P)) / rate(P) + disturbance(P) + exposed(D, P) + pending(D) x gap(D)
    disturbance = prefill seconds x sequences that decode beside it x STREAM_WEIGHT
    exposed     = hand-over + the part of the transfer that is longer than the prefill

Rates, gaps, links and hand-overs are the engines' own measurements; the constants stand in until there are some. Only
engines of one revision and fingerprint, with a common transport and young reports, are paired. A pool's role is a
preference that is worth `AGAINST_ROLE_S`.

Pure; called by `Backends`. O(number of engines): the prefill part of a split does not depend on who answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from stoker.router.load import Load, Peer
from stoker.router.snapshot import Role
from stoker.router.work import Work

TOKENS_PER_S = 5000.0
"""Prefill rate of a backend while none has been measured."""
GAP_S = 0.02
"""Gap between two tokens while none has been measured."""
HANDOVER_S = 0.025
"""Time to hand a request over while none has been measured."""
BYTES_PER_TOKEN = 150_000
"""Cache of a token while the engine reports no `block_bytes`."""
LINK_BYTES_PER_S: Mapping[str, float] = {"cuda-ipc": 300e9, "nixl": 20e9, "shared-memory": 2e9, "tcp": 0.5e9}
"""Rate of a transport while none has been measured. One that is not listed counts as `tcp`."""
ONE_HOST = frozenset(("cuda-ipc", "shared-memory"))
"""Transports between engines of one host."""
STREAM_WEIGHT = 0.05
"""What a second of prefill costs each sequence that decodes beside it, in seconds of a first token: half of its rate,
and a late token of a running answer counts a tenth of a late first one."""
AGAINST_ROLE_S = 2.0
"""Seconds that must be saved before an engine works against its pool's role."""
SPLIT_GAIN = 1.05
"""A split must be predicted to be cheaper by this factor."""


class Place(Protocol):
    """The part of a backend that the choice uses."""

    @property
    def identity(self) -> tuple[str, str]:
        """Pod uid and epoch."""
        ...

    @property
    def role(self) -> Role:
        """The role that it prefers now."""
        ...

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        ...

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...

    @property
    def unstarted_tokens(self) -> int:
        """Prompt tokens of this router's requests without a first byte that it computes."""
        ...

    @property
    def load(self) -> Load | None:
        """The engine's newest report, while it is young; None without one."""
        ...

    @property
    def silent(self) -> bool:
        """Whether an engine that reported has not done so for long."""
        ...


P = TypeVar("P", bound=Place)


@dataclass(frozen=True)
class Pair(Generic[P]):
    """The engines of one request."""

    answers: P
    helper: P | None = None
    """The engine that computes the prompt; None: the answering engine does."""
    uncached: int = 0
    """Tokens of the prompt that have to be computed, about."""

    @property
    def computes(self) -> P:
        """The engine that computes the prompt."""
        return self.answers if self.helper is None else self.helper


class PairPolicy(ABC):
    """A policy that looks at the work of a request, and chooses who answers and who computes the prompt together."""

    @abstractmethod
    def pair(self, ready: Sequence[P], helpers: Sequence[P], turn: int, work: Work) -> Pair[P]:
        """Choose who answers, out of `ready`, and who computes the prompt, out of `helpers` or itself. No effect."""

    def note(self, work: Work, pair: Pair[P]) -> None:  # noqa: B027  (a policy without memory notes nothing)
        """Remember that the engines of a pair get the request."""

    @abstractmethod
    def __call__(self, ready: Sequence[P], turn: int, work: Work) -> P:
        """Choose who serves a request alone."""


class Measured(NamedTuple):
    """One engine's state and rates in one decision."""

    queue: int
    """Prompt tokens that wait."""
    pending: int
    decoding: int
    rate: float
    """Prompt tokens per second."""
    gap_s: float

    def prefill_s(self, uncached: int) -> float:
        """Predict the time to the first token of a prompt with `uncached` tokens to compute, disturbance included."""
        own = uncached / self.rate if uncached > 0 else 0.0
        return self.queue / self.rate + own * (1 + self.decoding * STREAM_WEIGHT)

    @property
    def decode_s(self) -> float:
        return self.pending * self.gap_s


def measured(place: Place, load: Load | None, default_rate: float = TOKENS_PER_S) -> Measured:
    """Join an engine's report, while it is young, with this router's own requests, which count at once."""
    queue, pending, rate, gap, decoding = place.unstarted_tokens, place.pending, default_rate, GAP_S, 0
    if load is not None:
        queue = load.waiting_tokens if load.waiting_tokens > queue else queue
        pending = load.requests if load.requests > pending else pending
        rate, gap, decoding = load.prefill_tokens_per_s or rate, load.gap_s or gap, load.decoding
    return Measured(queue, pending, decoding, rate, gap)


def whole_s(place: Place, seen: Measured, uncached: int) -> float:
    """Predict the cost of a request that one engine serves alone."""
    price = AGAINST_ROLE_S if place.role == "prefill" else 0.0
    return seen.prefill_s(uncached) + seen.pending * seen.gap_s + price


def against(place: Place, other: Role) -> float:
    """The price of work that is the other role's."""
    return AGAINST_ROLE_S if place.role == other else 0.0


def link_rate(one: Peer, other: Peer) -> float | None:
    """Bytes per second between two engines; None without a common transport."""
    near = one.host_id == other.host_id != ""
    common = [name for name in one.transports if name in other.transports and (near or name not in ONE_HOST)]
    if not common:
        return None
    expected = max(LINK_BYTES_PER_S.get(name, LINK_BYTES_PER_S["tcp"]) for name in common)
    return one.link_bytes_per_s or other.link_bytes_per_s or expected


def exposed_s(answering: Peer, helping: Peer, sent_tokens: int, prefill_s: float) -> float | None:
    """Predict what the hand-over adds behind a prefill of `prefill_s`; None where the two cannot exchange blocks."""
    rate = link_rate(answering, helping)
    if answering.fingerprint != helping.fingerprint or rate is None:
        return None
    size, block_bytes = helping.block_size, helping.block_bytes or helping.block_size * BYTES_PER_TOKEN
    transfer_s = -(-max(sent_tokens, 0) // size) * block_bytes / rate
    handover_s = HANDOVER_S if answering.handover_s is None else answering.handover_s
    return handover_s + max(transfer_s - prefill_s, 0.0)


class _Helper(NamedTuple, Generic[P]):
    """The best helper of a group whose members are alike for an answering engine."""

    place: P
    peer: Peer
    uncached: int
    prefill_s: float
    """The time that hides a transfer: its own prefill."""
    cost_s: float


class Helpers(Generic[P]):
    """The best helpers for a prompt: one for each revision and fingerprint, and one for each host of those."""

    def __init__(
        self, places: Iterable[P], uncached: Mapping[tuple[str, str], int], rate: float,
        seen: Mapping[tuple[str, str], Measured] | None = None,
    ) -> None:  # fmt: skip
        """`seen`: what is measured of some of the engines already, by identity."""
        self._best: dict[tuple[str, str, str | None], tuple[_Helper[P], ...]] = {}
        self._lowest_s = float("inf")
        """Cost of the cheapest helper."""
        known = seen or {}
        for place in places:
            load = place.load
            if load is not None and load.peer is not None and not place.silent:
                identity = place.identity
                self._add(place, load.peer, known.get(identity) or measured(place, load, rate), uncached[identity])

    def _add(self, place: P, peer: Peer, seen: Measured, uncached: int) -> None:
        cost_s = seen.prefill_s(uncached) + against(place, "decode")
        self._lowest_s = min(self._lowest_s, cost_s)
        revision, fingerprint, found = place.revision, peer.fingerprint, None
        for host in (None, peer.host_id):
            key = revision, fingerprint, host
            known = self._best.get(key, ())
            if len(known) == 2 and cost_s >= known[1].cost_s:  # two: the answering engine may be the best one itself
                continue
            found = found or _Helper(place, peer, uncached, max(uncached, 0) / seen.rate, cost_s)
            both = (found, *known) if not known or cost_s < known[0].cost_s else (known[0], found)
            self._best[key] = both[:2]

    def pair_s(
        self, answers: P, seen: Measured, cached: int, tokens: int, below: float
    ) -> tuple[float, _Helper[P]] | None:
        """Predict the cost of the best split for an answering engine that has `cached` of the prompt's `tokens`.

        None where no split costs less than `below`.
        """
        own_s = seen.decode_s + against(answers, "prefill")
        if own_s + self._lowest_s >= below:
            return None
        load = answers.load
        if load is None or load.peer is None:
            return None
        best: tuple[float, _Helper[P]] | None = None
        for host in (None, load.peer.host_id):
            for helper in self._best.get((answers.revision, load.peer.fingerprint, host), ()):
                if helper.place is answers or helper.cost_s + own_s >= below:
                    continue
                exposed = exposed_s(load.peer, helper.peer, tokens - cached, helper.prefill_s)
                if exposed is not None and helper.cost_s + exposed + own_s < below:
                    below = helper.cost_s + exposed + own_s
                    best = below, helper
        return best


def cheapest_split(
    options: Iterable[tuple[P, Measured, int]], helpers: Helpers[P], tokens: int, whole: float
) -> Pair[P] | None:
    """Choose the cheapest pair; None where an engine alone, at a cost of `whole` seconds, is as cheap.

    Args:
        options: the engines that may answer, with what each would have to compute of the prompt's `tokens`.
    """
    lowest, pair = whole / SPLIT_GAIN, None
    for answers, seen, uncached in options:
        found = helpers.pair_s(answers, seen, tokens - uncached, tokens, lowest)
        if found is not None:
            lowest, pair = found[0], Pair(answers, found[1].place, found[1].uncached)
    return pair


def split_or_whole(
    answers: P, others: Sequence[P], tokens: int, cached: Mapping[tuple[str, str], int], rate: float = TOKENS_PER_S
) -> Pair[P]:
    """Choose the helper of a request whose answering engine another policy has chosen."""
    if not others:
        return Pair(answers, None, tokens)
    uncached = {one.identity: tokens - cached.get(one.identity, 0) for one in (answers, *others)}
    seen, own = measured(answers, answers.load, rate), uncached[answers.identity]
    alone = Pair(answers, None, own)
    helpers = Helpers(others, uncached, rate)
    return cheapest_split([(answers, seen, own)], helpers, tokens, whole_s(answers, seen, own)) or alone


def of_role(ready: Sequence[P]) -> Sequence[P]:
    """The engines whose role is to answer; all, where there is none."""
    return [one for one in ready if one.role != "prefill" and not one.silent] or ready
