"""The choice of a pair: the engine that answers a request, and perhaps another one that computes its prompt.

Predicted seconds decide. `whole`: the engine computes the prompt itself. `split`: the helper computes the prompt and
streams its first tokens, the blocks travel, the answering engine takes over. A request is split only where that is
predicted to cost less than the cheapest engine alone, so idle engines never split.

    whole(E)    = (queue(E) + uncached(E)) / rate(E) + disturbance(E) + pending(E) x gap(E)
    split(D, P) = (queue(P) + uncached(P)) / rate(P) + disturbance(P) + exposed(D, P) + pending(D) x gap(D)
    queue       = tokens of other prompts that the engine computes before, by its rule (`prompt_order`)
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
from operator import add, itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from stoker.router.load import Load, Peer
from stoker.router.standing import TOKENS_PER_S, Known, Standing
from stoker.router.work import Work

HANDOVER_S = 0.025
"""Time to hand a request over while none has been measured."""
BYTES_PER_TOKEN = 150_000
"""Cache of a token while the engine reports no `block_bytes`."""
LINK_BYTES_PER_S: Mapping[str, float] = {"cuda-ipc": 300e9, "nixl": 20e9, "shared-memory": 2e9, "tcp": 0.5e9}
"""Rate of a transport while none has been measured. One that is not listed counts as `tcp`."""
ONE_HOST = frozenset(("cuda-ipc", "shared-memory"))
"""Transports between engines of one host."""
SPLIT_GAIN = 1.05
"""A split must be predicted to be cheaper by this factor."""


class Place(Known, Protocol):
    """The part of a backend that the choice uses."""

    @property
    def identity(self) -> tuple[str, str]:
        """Pod uid and epoch."""
        ...

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        ...

    @property
    def silent(self) -> bool:
        """Whether an engine that reported has not done so for long; never with a young report."""
        ...

    @property
    def standing(self) -> Standing:
        """What `standing_of` computes of it now."""
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

    def reported(self, place: Place, load: Load) -> None:  # noqa: B027
        """Take a report of an engine."""

    def name_of(self, work: Work) -> str:  # noqa: ARG002
        """The name of a request's beginning for engines with a store; empty: it needs none."""
        return ""

    @abstractmethod
    def __call__(self, ready: Sequence[P], turn: int, work: Work) -> P:
        """Choose who serves a request alone."""


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


def prompt_costs(standings: Sequence[Standing], uncached: Sequence[int], rate: float) -> list[float]:
    """Return the cost of a request's prompt at each engine, in seconds: to it the engine's side of the rest is added.

    A call only where the prompt passes some. Its slow twin is in the tests, by `measured`.

    Args:
        rate: of engines that have not measured their own.
    """
    return [
        ((tokens if missing > most_passing else queue.before(missing)) + (missing * share if missing > 0 else 0.0))
        / (per_s or rate)
        for (queue, tokens, most_passing, per_s, share, _, _), missing in zip(standings, uncached, strict=True)
    ]


class Option(NamedTuple, Generic[P]):
    """An engine as one side of a pair."""

    cost_s: float
    place: P
    uncached: int
    """Tokens of the prompt that it would have to compute."""


def cheaper_than(
    limit: float, least: float, costs: Sequence[float], places: Sequence[P], uncached: Sequence[int]
) -> list[Option[P]]:
    """Return the engines whose cost on one side, with `least` on the other, is below `limit`; few are."""
    return [
        Option(cost, place, missing)
        for cost, place, missing in zip(costs, places, uncached, strict=True)
        if cost + least < limit
    ]


class _Group(Generic[P]):
    """The two cheapest helpers of a revision and fingerprint, and those of each host: one may be who answers."""

    def __init__(self) -> None:
        self.anywhere: list[Option[P]] = []
        self.on: dict[str, list[Option[P]]] = {}

    def add(self, option: Option[P], host: str) -> None:
        """Add the next one in the order of costs."""
        here = self.on.get(host)
        if here is None:
            self.on[host] = [option]
        elif len(here) < 2:
            here.append(option)
        if len(self.anywhere) < 2:
            self.anywhere.append(option)


def cheapest_split(
    answers: Sequence[Option[P]], helpers: Sequence[Option[P]], turn: int, rate: float, whole: float
) -> Pair[P] | None:
    """Choose the cheapest pair; None where an engine alone, at a cost of `whole` seconds, is as cheap.

    Args:
        answers: the engines that may answer, with what each would have to compute alone.
        turn: among equals, they take turns.
        rate: of engines that have not measured their own.
    """
    lowest, pair = whole / SPLIT_GAIN, None
    least = min([option[0] for option in answers], default=0.0)
    helpers = _by_cost([option for option in helpers if option[0] + least < lowest], turn)
    if not helpers:
        return None
    groups, begin = _grouped(helpers), helpers[0].cost_s
    for own in _by_cost([option for option in answers if option[0] + begin < lowest], turn):
        if own.cost_s + begin >= lowest:
            break
        load = own.place.load
        group = groups.get((own.place.revision, load.peer.fingerprint)) if load and load.peer else None
        if group is None or load is None or load.peer is None:
            continue
        for helper in (*group.anywhere, *group.on.get(load.peer.host_id, ())):
            if helper.place is own.place or own.cost_s + helper.cost_s >= lowest:
                continue
            exposed = _exposed_s(load.peer, helper, own.uncached, rate)
            if exposed is not None and own.cost_s + helper.cost_s + exposed < lowest:
                lowest, pair = own.cost_s + helper.cost_s + exposed, Pair(own.place, helper.place, helper.uncached)
    return pair


def _by_cost(options: list[Option[P]], turn: int) -> list[Option[P]]:
    begin = turn % len(options) if options else 0
    return sorted([*options[begin:], *options[:begin]], key=itemgetter(0))


def _grouped(helpers: Iterable[Option[P]]) -> dict[tuple[str, str], _Group[P]]:
    groups: dict[tuple[str, str], _Group[P]] = {}
    for option in helpers:
        place = option.place
        load = place.load
        if load is None or load.peer is None:
            continue
        key = place.revision, load.peer.fingerprint
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group()
        group.add(option, load.peer.host_id)
    return groups


def _exposed_s(answering: Peer, helper: Option[P], sent_tokens: int, rate: float) -> float | None:
    """As `exposed_s`; the helper's own prefill hides the transfer."""
    load = helper.place.load
    if load is None or load.peer is None:
        return None
    prefill_s = max(helper.uncached, 0) / (load.prefill_tokens_per_s or rate)
    return exposed_s(answering, load.peer, sent_tokens, prefill_s)


def split_or_whole(
    answers: P, others: Sequence[P], tokens: int, cached: Mapping[tuple[str, str], int], rate: float = TOKENS_PER_S
) -> Pair[P]:
    """Choose the helper of a request whose answering engine another policy has chosen."""
    if not others:
        return Pair(answers, None, tokens)
    places = (answers, *others)
    uncached = [tokens - cached.get(one.identity, 0) for one in places]
    standings = [one.standing for one in places]
    costs = prompt_costs(standings, uncached, rate)
    own = Option(standings[0].answering_s, answers, uncached[0])
    helpers = [
        Option(cost + standing.helping_s, place, missing)
        for cost, standing, place, missing in zip(costs[1:], standings[1:], others, uncached[1:], strict=True)
    ]
    return cheapest_split([own], helpers, 0, rate, costs[0] + own.cost_s) or Pair(answers, None, uncached[0])


def cheapest(places: Sequence[P], tokens: int, turn: int, rate: float = TOKENS_PER_S) -> P:
    """Choose the data rank of an engine that another policy has chosen; among equals in turn."""
    if len(places) == 1:
        return places[0]
    standings = [one.standing for one in places]
    costs = list(
        map(add, prompt_costs(standings, [tokens] * len(places), rate), [one.answering_s for one in standings])
    )
    best = [place for place, cost in zip(places, costs, strict=True) if cost == min(costs)]
    return best[turn % len(best)]


def of_role(ready: Sequence[P]) -> Sequence[P]:
    """The engines whose role is to answer; all, where there is none."""
    return [one for one in ready if one.role != "prefill" and not one.silent] or ready
