"""Several cores behind one front, its data ranks: each has the whole model, and a request goes to the one that a router
names, else to the one with least to do.

To a front it is what a `CoreClient` is. They live and end together: the first that fails is the group's failure.

Made by `program` for `parallelism.data` above 1.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from stoker.engine.core.core_client import CoreClient, RunningRequest
from stoker.engine.core.merged_transfer import merged_transfer
from stoker.engine.core.messages import AddRequest, CoreState, ModelFacts, Phase, RequestProgress
from stoker.engine.core.stats import (
    ClassStats,
    ColdTierStats,
    ExpertStats,
    HostTierStats,
    SharedStoreStats,
    Stats,
    TransferStats,
)
from stoker.pod.beginnings import MOST_ANNOUNCED

PHASES: Sequence[Phase] = ("Failed", "Loading", "Warming", "Draining", "Serving", "Drained")
"""The group is in the first of these in which a core is."""
NEWEST = ("time_s", "progressed_s")
"""Times of `Stats`; every other field is a number, or numbers, that add up."""


class CoreGroup:
    """The front's ends of several wires."""

    def __init__(self, cores: Sequence[CoreClient]) -> None:
        self.cores = tuple(cores)
        self.on_state: Callable[[CoreState], None] = lambda _: None
        self._load = [0] * len(self.cores)
        """Tokens, read and to be written, of each core's open requests."""
        self._owner: dict[str, int] = {}
        """Core of each open request."""
        for core in self.cores:
            core.on_state = self._follow

    def _follow(self, _: CoreState) -> None:
        self.on_state(self.state)

    # State.

    @property
    def state(self) -> CoreState:
        states = [core.state for core in self.cores]
        worst = min(states, key=lambda state: PHASES.index(state.phase))
        return replace(worst, model=merged_facts([state.model for state in states]))

    @property
    def stats(self) -> Stats | None:
        """The sums; None until every core has sent its own."""
        found = [core.stats for core in self.cores]
        known = [stats for stats in found if stats is not None]
        return merged_stats(known) if len(known) == len(found) else None

    @property
    def serving(self) -> bool:
        """Whether every core takes requests and makes progress."""
        return all(core.serving for core in self.cores)

    @property
    def dead(self) -> bool:
        return any(core.dead for core in self.cores)

    @property
    def problem(self) -> str:
        """The reason why the group takes no requests now; empty while it takes them."""
        return next((core.problem for core in self.cores if not core.serving), self.state.message)

    @property
    def running(self) -> int:
        """Number of this front's requests that have not ended."""
        return sum(core.running for core in self.cores)

    # Requests.

    @property
    def num_ranks(self) -> int:
        """Data ranks: the cores."""
        return len(self.cores)

    @property
    def next_rank(self) -> int:
        """The core with the fewest tokens in work."""
        return least_loaded([(self._in_work(number), core.running) for number, core in enumerate(self.cores)])

    def transfer_of(self, rank: int) -> TransferStats | None:
        """What a core exchanges with other engines, by its newest report."""
        return self.cores[rank].transfer_of(0)

    @contextmanager
    def request(self, request: AddRequest, rank: int | None = None) -> Iterator[RunningRequest]:
        """Send a request to a core, by default to `next_rank`. Raises CoreLost, as `CoreClient.request`."""
        number = self.next_rank if rank is None else rank
        tokens = len(request.prompt_tokens) + request.params.n * (request.params.max_tokens or 1)
        self._load[number] += tokens
        self._owner[request.request_id] = number
        try:
            with self.cores[number].request(request) as running:
                yield running
        finally:
            self._load[number] -= tokens
            self._owner.pop(request.request_id, None)

    def _in_work(self, number: int) -> int:
        """Tokens of a core's open requests, and of the prompts that it computes for other engines."""
        transfer = self.transfer_of(number)
        return self._load[number] + (transfer.helping_tokens if transfer is not None else 0)

    async def inspect(self, request_ids: Sequence[str]) -> tuple[RequestProgress, ...]:
        """How far those of the requests are that have not ended. Raises CoreLost."""
        asked: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._owner:
                asked.setdefault(self._owner[request_id], []).append(request_id)
        answers = await asyncio.gather(*(self.cores[number].inspect(ids) for number, ids in asked.items()))
        return tuple(progress for answer in answers for progress in answer)

    # Life.

    async def start(self) -> None:
        for core in self.cores:
            await core.start()

    async def close(self) -> None:
        for core in self.cores:
            await core.close()

    def lose(self, reason: str) -> None:
        """Treat all cores as gone."""
        for core in self.cores:
            core.lose(reason)

    def drain(self, deadline_s: float) -> None:
        for core in self.cores:
            core.drain(deadline_s)

    def forget(self, identity: bytes) -> None:
        """Abort the requests of another front, whose process has ended."""
        for core in self.cores:
            core.forget(identity)

    def stop(self) -> None:
        for core in self.cores:
            core.stop()


Cores = CoreClient | CoreGroup


def least_loaded(loads: Sequence[tuple[int, int]]) -> int:
    """The number of the core with the fewest tokens in work, among equals with the fewest requests.

    Args:
        loads: tokens in work and running requests of each core.
    """
    return min(range(len(loads)), key=loads.__getitem__)


def merged_facts(facts: Sequence[ModelFacts | None]) -> ModelFacts | None:
    """The model that all cores serve; None until all know it."""
    known = [one for one in facts if one is not None]
    if len(known) < len(facts):
        return None
    return replace(
        known[0],
        max_model_len=min(one.max_model_len for one in known),
        num_blocks=sum(one.num_blocks for one in known),
    )


def merged_stats(stats: Sequence[Stats]) -> Stats:
    """The sums of counters and gauges, and the newest times. Ranks are numbered through."""
    names = [field.name for field in fields(Stats) if field.name != "transfer"]
    values: dict[str, Any] = {name: _sum([getattr(one, name) for one in stats]) for name in names}
    values["transfer"] = merged_transfer(stats)
    values |= {name: max(getattr(one, name) for one in stats) for name in NEWEST}
    ranks = [state for one in stats for state in one.ranks]
    values["classes"] = merged_classes(one for stat in stats for one in stat.classes)
    values["ranks"] = tuple(state._replace(rank=number) for number, state in enumerate(ranks))
    return Stats(**values)


def merged_classes(parts: Iterable[ClassStats]) -> tuple[ClassStats, ...]:
    """The sums by class, in the order of classes."""
    by_place: dict[int, list[ClassStats]] = {}
    for part in parts:
        by_place.setdefault(part.place, []).append(part)
    return tuple(
        ClassStats(place, *(_sum([getattr(one, name) for one in found]) for name in CLASS_SUMS))
        for place, found in sorted(by_place.items())
    )


CLASS_SUMS = tuple(field.name for field in fields(ClassStats) if field.name != "place")
TIER_SUMS = ("total_blocks", "used_blocks", "saved", "loaded", "evicted", "damaged", "failed", "swapped", "late")
"""Counts of `HostTierStats`; its other fields are those of the first core."""
EXPERT_SUMS = ("slots", "experts", "hits", "misses", "loaded_bytes", "waited_s")
"""Counts of `ExpertStats`; the size of an expert is that of the first core."""
COLD_SUMS = (
    "total_bytes", "used_bytes", "blocks", "found", "saved", "loaded", "evicted", "damaged", "foreign", "failed",
    "cleaned", "late",
)  # fmt: skip
"""Counts of `ColdTierStats`; the state is that of the first core with a trouble."""


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, of mappings by key, of tuples by place, or of the tiers that there are."""
    if None in values:
        known = [value for value in values if value is not None]
        return _sum(known) if known else None
    if isinstance(values[0], SharedStoreStats):
        announced = {name: stored for value in values for name, stored in value.announced.items()}
        return replace(values[0], announced=dict(list(announced.items())[-MOST_ANNOUNCED:]))
    if isinstance(values[0], HostTierStats):
        return replace(values[0], **{name: sum(getattr(value, name) for value in values) for name in TIER_SUMS})
    if isinstance(values[0], ExpertStats):
        return replace(values[0], **{name: sum(getattr(value, name) for value in values) for name in EXPERT_SUMS})
    if isinstance(values[0], ColdTierStats):
        worst = next((value for value in values if value.state != "ok"), values[0])
        return replace(worst, **{name: sum(getattr(value, name) for value in values) for name in COLD_SUMS})
    if isinstance(values[0], Mapping):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip(*values, strict=True))) if values[0] and isinstance(values[0][0], int) else ()
    return sum(values)
