"""Blocks between the host tier's slots and the tiers below it.

What the host tier has saved is also written below, the oldest first, as fast as that goes. Blocks of a waiting sequence
that are only below are fetched into slots of the host tier before the sequence is admitted; from there they go the way
of all its blocks (`host_tier`). A fetch is begun where it takes less time than computing the tokens, as measured. One
that is late is not waited for: when computing what is left became faster, or in any case after `BLOCK_S` for each
block.

Called by the host tier, in the core's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.cold_tier import ColdTier
from stoker.engine.core.host_index import HostEntry, HostIndex
from stoker.engine.core.request import Sequence as TokenSequence
from stoker.engine.core.stats import ColdTierStats
from stoker.engine.core.tier_costs import TierCosts

BLOCK_S = 0.05
LEAST_WAIT_S = 0.25
"""A fetch of few blocks is waited for at least as long, unless computing is faster."""
PROBE_S = 60.0
"""Time after which a tier that was too slow is tried again."""
MEASURED_BLOCKS = 16
FETCHED_SHARE = 2
"""One of so many slots of the host tier is filled from below at one time, at most."""


WaitForAny = Callable[[Sequence[Future[Any]], float], None]
"""Waits for one of these, and no longer than so many seconds."""


def wait_for_any(pending: Sequence[Future[Any]], timeout_s: float) -> None:
    """As `WaitForAny`, where other threads end them."""
    wait(pending, timeout_s, FIRST_COMPLETED)


@dataclass(eq=False)
class _Fetch:
    """Blocks that a waiting sequence needs and that are on their way."""

    entries: list[HostEntry]
    begun_s: float
    given_up: bool = False

    @property
    def num_left(self) -> int:
        return sum(entry.fetching for entry in self.entries)


class ColdTraffic:
    """Writes and fetches of one engine."""

    def __init__(
        self, index: HostIndex, tiers: Sequence[ColdTier], costs: TierCosts, block_size: int, block_bytes: int,
        clock: Callable[[], float], wait_for_any: WaitForAny = wait_for_any,
    ) -> None:  # fmt: skip
        """`tiers`: the fastest first."""
        self._wait_for_any = wait_for_any
        self.index, self.tiers, self.costs, self.clock = index, tuple(tiers), costs, clock
        self.block_size, self.block_bytes = block_size, block_bytes
        self.num_late = 0
        self._unwritten: dict[str, OrderedDict[HostEntry, None]] = {tier.name: OrderedDict() for tier in self.tiers}
        self._num_writing = 0
        self._fetches: dict[TokenSequence, _Fetch] = {}
        """By waiting sequence, until it leaves; each fetches once."""
        self._begun: set[HostEntry] = set()
        """Entries that are being fetched."""
        self._last_fetch_s = clock() - PROBE_S
        self._measured_s, self._measured_bytes = 0.0, 0

    @property
    def behind(self) -> bool:
        """Whether so much is to be written that nothing needs to be saved ahead of time."""
        most = self.index.num_slots // 4
        return any(len(unwritten) > most for unwritten in self._unwritten.values())

    @property
    def settled(self) -> bool:
        """Whether all that can be written is, and nothing is under way."""
        return not any(self._unwritten.values()) and not any(tier.busy for tier in self.tiers)

    @property
    def num_pins(self) -> int:
        """Entries that are being written, each counted for each tier."""
        return self._num_writing

    # Writes.

    def saved(self, entry: HostEntry) -> None:
        """Note a block that is complete in the host tier."""
        for unwritten in self._unwritten.values():
            unwritten[entry] = None
            if len(unwritten) > self.index.num_slots:
                unwritten.popitem(last=False)  # older than all that is in the host tier

    def write(self) -> None:
        """Begin to write what is only in the host tier."""
        for tier in self.tiers:
            unwritten = self._unwritten[tier.name]
            room = tier.room() if unwritten else 0
            while unwritten and room > 0 and self._num_writing < max(self.index.num_slots // 4, 1):
                entry, _ = unwritten.popitem(last=False)
                if not entry.dropped and tier.write(entry):
                    self.index.pin(entry)
                    self._num_writing += 1
                    room -= 1

    # Fetches.

    def holds_back(self, sequence: TokenSequence) -> bool:
        """Whether the first in the queue should wait for blocks on their way. False: not any more."""
        fetch = self._fetches[sequence]
        if not self._late(fetch):
            return True
        fetch.given_up = True
        self.num_late += 1
        return False

    def fetch(self, sequence: TokenSequence, contents: Sequence[BlockContent]) -> None:
        """Begin to fetch blocks that follow without a gap, where that is faster than computing them.

        `contents`: those that the cache lacks.
        """
        coming, missing = self._run(contents)
        if not (coming or missing) or (missing and not self._pays(len(missing))):
            return
        begun = [self._begin(content, tier) for content, tier in missing]
        entries = [*coming, *(entry for entry in begun if entry is not None)]
        self._fetches[sequence] = _Fetch(entries, self.clock())

    def knows(self, sequence: TokenSequence) -> bool:
        """Whether blocks were sent for since the sequence waits."""
        return sequence in self._fetches

    def fetching(self, sequence: TokenSequence) -> bool:
        """Whether blocks of a waiting sequence are on their way from below."""
        fetch = self._fetches.get(sequence)
        return fetch is not None and not fetch.given_up and fetch.num_left > 0

    def leave(self, sequence: TokenSequence) -> None:
        """The sequence needs no blocks any more. What was begun goes on, for others."""
        self._fetches.pop(sequence, None)

    def poll(self) -> None:
        """Take up what has ended."""
        for tier in self.tiers:
            written, read = tier.poll()
            for entry in written:
                self.index.unpin(entry, used=False)
                self._num_writing -= 1
            for entry, total in read:
                self._end(entry, total)

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for a fetch; nothing else is to be done."""
        pending = [future for tier in self.tiers for future in tier.pending()]
        if pending:
            self._wait_for_any(pending, timeout_s)

    def faults(self) -> Iterator[str]:
        """Findings of an audit."""
        for tier in self.tiers:
            yield from tier.faults()
        if any(entry.sum is not None or not entry.fetching for entry in self._begun):
            yield "a block is fetched from below that is there"

    def stats(self, name: str) -> ColdTierStats | None:
        """Figures of one tier; None where it is not configured."""
        found = self.find(name)
        return replace(found.stats(), late=self.num_late) if found is not None else None

    def find(self, name: str) -> ColdTier | None:
        """The tier of a name; None where it is not configured."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _run(self, contents: Sequence[BlockContent]) -> tuple[list[HostEntry], list[tuple[BlockContent, ColdTier]]]:
        """Entries that are being fetched already, and blocks below, without a gap; passes over the host tier's own."""
        tiers = [tier for tier in self.tiers if tier.readable]
        room = max(self.index.num_slots // FETCHED_SHARE, 1) - len(self._begun)
        coming: list[HostEntry] = []
        missing: list[tuple[BlockContent, ColdTier]] = []
        for content in contents:
            known = self.index.find(content)
            if known is not None:
                coming += [known] if known.fetching else []
                continue
            tier = next((tier for tier in tiers if tier.holds(content)), None)
            if tier is None or len(missing) >= room:
                break
            missing.append((content, tier))
        return coming, missing

    def _pays(self, num_blocks: int) -> bool:
        if self.costs.fetches(num_blocks * self.block_size, num_blocks * self.block_bytes):
            return True
        return self.clock() >= self._last_fetch_s + PROBE_S

    def _begin(self, content: BlockContent, tier: ColdTier) -> HostEntry | None:
        entry = self.index.begin_save(content)
        if entry is None:
            return None
        entry.fetching = True
        if not self._begun:
            self._measured_s, self._measured_bytes = self.clock(), 0
        self._begun.add(entry)
        self._last_fetch_s = self.clock()
        tier.read(entry)
        return entry

    def _end(self, entry: HostEntry, total: int | None) -> None:
        self._begun.remove(entry)
        entry.fetching = False
        if total is None:
            self.index.drop(entry)
            return
        self._measure()
        self.index.publish(entry, total)
        self.saved(entry)  # for the other tiers

    def _measure(self) -> None:
        """Take the speed of all reads together, over some blocks."""
        self._measured_bytes += self.block_bytes
        if not self._begun or self._measured_bytes >= MEASURED_BLOCKS * self.block_bytes:
            self.costs.fetched.record(self._measured_bytes, self.clock() - self._measured_s)
            self._measured_s, self._measured_bytes = self.clock(), 0

    def _late(self, fetch: _Fetch) -> bool:
        waited_s = self.clock() - fetch.begun_s
        if waited_s > max(BLOCK_S * len(fetch.entries), LEAST_WAIT_S):
            return True
        num_left = fetch.num_left
        return not self.costs.fetches(num_left * self.block_size, num_left * self.block_bytes)
