"""The host tier: cold blocks and those of preempted sequences in main memory, and their way back.

Blocks are saved while nothing waits for them: the oldest cached ones when few others could be evicted without loss
(watermarks), and those of a sequence at its preemption, where that is cheaper than to compute it again. A saved content
can be found when its copy is complete.

A waiting sequence whose next blocks are here gets them before it is admitted: they are loaded into blocks of the cache,
compared with their checksums, and made findable in the prefix cache. Then the sequence is admitted as one whose prefix
was cached, so its tokens are those of a cached prefix. A load that would take longer than computing the tokens is not
begun, and one that is late is not waited for. A damaged block ends the loaded prefix and is given up. Below this tier
there may be others (`cold_traffic`), whose blocks come into this one first.

Steps and copies run beside each other: `fence` orders a step behind the saves of the blocks that it writes.

One per engine, called by the scheduler and the engine in the core's thread. No torch: bytes move through a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stoker.engine.core.blocks import BlockContent, BlockManager
from stoker.engine.core.disk.cold_traffic import ColdTraffic
from stoker.engine.core.host_index import HostEntry, HostIndex
from stoker.engine.core.request import Sequence
from stoker.engine.core.stats import ColdTierStats, HostTierStats
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.execution.step import StepInput
from stoker.engine.transfer.checksum import content_seed, seeded
from stoker.engine.transfer.port import Move, ReadableLink
from stoker.engine.transfer.ticket import SummedTicket

CLEAN_LOW, CLEAN_HIGH = 0.10, 0.15
"""Saving begins when a smaller share of the cache's blocks could be evicted without loss, and ends at the larger."""
MOST_SAVES = 16
"""Blocks that one step begins to save because they are cold."""
MOST_WRITES = 2
"""Writes of cold blocks under way."""
LOOK_AHEAD = 4
"""Waiting sequences whose blocks are loaded before it is their turn."""


@dataclass(eq=False)
class _Save:
    entries: list[HostEntry]
    blocks: frozenset[int]
    ticket: SummedTicket


@dataclass(eq=False)
class _Load:
    """A load for one sequence; it owns blocks of the cache, also after its end, until the sequence is admitted."""

    sequence: Sequence | None
    """None: it has ended, or is computing these tokens itself."""
    tokens: list[int]
    """All tokens up to the end of the loaded blocks."""
    first: int
    """Index of the first loaded block."""
    entries: list[HostEntry]
    ticket: SummedTicket | None = None
    begun_s: float = 0.0


@dataclass
class _Known:
    """A waiting sequence's contents, digested once."""

    num_tokens: int
    contents: list[BlockContent] = field(default_factory=list)


class HostTier:
    """Saves and loads of one engine."""

    def __init__(
        self, blocks: BlockManager, index: HostIndex, link: ReadableLink, costs: TierCosts, block_bytes: int,
        clock: Callable[[], float], cold: ColdTraffic | None = None,
    ) -> None:  # fmt: skip
        """`cold`: the way to tiers below."""
        assert blocks.root is not None, "the tier knows contents by their digests"
        self.blocks, self.index, self.link, self.costs, self.clock = blocks, index, link, costs, clock
        self.block_bytes, self.root, self.cold = block_bytes, blocks.root, cold
        self._saves: list[_Save] = []
        self._loads: list[_Load] = []
        """Under way."""
        self._held: dict[Sequence, _Load] = {}
        """By waiting sequence: under way, or complete and kept for it."""
        self._known: dict[Sequence, _Known] = {}
        self._spilling = False
        self.num_saved = self.num_loaded = self.num_damaged = self.num_failed = 0
        self.num_swapped = self.num_late = 0

    # Called by the scheduler.

    def holds_back(self, sequence: Sequence, keep_free: int) -> bool:
        """Whether the first in the queue should wait for blocks that are on their way, or are sent for now."""
        load = self._held.get(sequence)
        if load is None:
            if self.cold is not None and self._fetches(sequence) and self.cold.holds_back(sequence):
                return True
            return self._begin_load(sequence, keep_free) or self._waits_for_save(sequence)
        if load not in self._loads:
            return False
        left = len(load.entries) * self.block_bytes - self._expected_bytes(load)
        if self.costs.loads(len(load.entries) * self.blocks.block_size, max(left, 0)):
            return True
        self.num_late += 1
        self.leave(sequence)
        return False

    def look_ahead(self, waiting: Iterable[Sequence], keep_free: int) -> None:
        """Send for the blocks of sequences behind the first."""
        for sequence in waiting:
            is_new = sequence not in self._held and sequence not in self._known and not sequence.num_pending
            if is_new and not self._fetches(sequence):
                self._begin_load(sequence, keep_free)

    def leave(self, sequence: Sequence) -> list[int]:
        """The sequence needs the tier no more: it was admitted or has ended. Returns blocks that are free now."""
        self._known.pop(sequence, None)
        if self.cold is not None:
            self.cold.leave(sequence)
        load = self._held.pop(sequence, None)
        if load is None:
            return []
        load.sequence = None
        return [] if load in self._loads else self.blocks.release(load)

    def give_up_held(self) -> bool:
        """Give back blocks that are kept for waiting sequences; their contents stay cached. False: there are none."""
        complete = [sequence for sequence, load in self._held.items() if load not in self._loads]
        for sequence in complete:
            self.leave(sequence)
        return bool(complete)

    def num_held(self, sequence: Sequence) -> int:
        """Blocks that are kept for a waiting sequence."""
        load = self._held.get(sequence)
        return len(self.blocks.table(load)) if load is not None else 0

    def swap_out(self, sequence: Sequence) -> None:
        """Save the blocks of a sequence that is being preempted, if that is cheaper than to compute it again."""
        if sequence.request.params.prompt_logprobs is not None:
            return  # it reads no cache
        contents = self.blocks.contents(sequence)
        if contents and self.costs.swaps(len(contents) * self.blocks.block_size, len(contents) * self.block_bytes):
            self.num_swapped += 1
            self._save(contents)

    # Called by the engine.

    def poll(self) -> list[int]:
        """Take up saves and loads that have ended. Returns free blocks whose content is damaged."""
        for save in [save for save in self._saves if save.ticket.done()]:
            self._saves.remove(save)
            self._end_save(save)
        dirty: list[int] = []
        for load in [load for load in self._loads if load.ticket is not None and load.ticket.done()]:
            self._loads.remove(load)
            dirty += self._end_load(load)
        if self.cold is not None:
            self.cold.poll()
        return dirty

    def spill(self) -> None:
        """Begin to save cold blocks while few could be evicted without loss; for tiers below as early as possible."""
        clean, total = self.blocks.num_clean, self.blocks.num_blocks
        self._spilling = clean < (CLEAN_HIGH if self._spilling else CLEAN_LOW) * total
        if self.cold is not None:
            self.cold.write()
            self._spilling = self._spilling or not self.cold.behind
        if self._spilling and len(self._saves) < MOST_WRITES:
            self._save(self.blocks.oldest_unsaved(MOST_SAVES))

    def not_loading(self, blocks: list[int]) -> list[int]:
        """The blocks that no load fills. Clearing the others could meet their load, which overwrites them anyway."""
        if not blocks:
            return blocks
        targets = {block for load in self._loads for block in self.blocks.table(load)[load.first :]}
        return [block for block in blocks if block not in targets]

    def fence(self, step: StepInput) -> None:
        """Order a step that is about to be submitted behind saves of the blocks that it may write."""
        if not self._saves:
            return
        written = {entry.block for entry in step.table} | {target for _, target in step.copies} | set(step.cleared)
        for save in self._saves:
            if not save.blocks.isdisjoint(written):
                self.link.fence(save.ticket)

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for the oldest transfer; nothing else is to be done."""
        tickets = [load.ticket for load in self._loads if load.ticket is not None]
        tickets += [save.ticket for save in self._saves]
        if tickets:
            tickets[0].wait(timeout_s)
        elif self.cold is not None:
            self.cold.wait(timeout_s)

    @property
    def busy(self) -> bool:
        """Whether saves or loads are under way."""
        return bool(self._saves or self._loads)

    def faults(self) -> Iterator[str]:
        """Findings of an audit, between two steps."""
        yield from self.index.faults()
        pins = sum(len(load.entries) for load in self._loads)
        if self.cold is not None:
            yield from self.cold.faults()
            pins += self.cold.num_pins
        if pins != self.index.num_pins:
            yield "loads and pins of the host tier differ"
        if any(load.sequence is not sequence for sequence, load in self._held.items()):
            yield "the host tier keeps blocks for a sequence that has gone"

    def stats(self) -> HostTierStats:
        return HostTierStats(
            total_blocks=self.index.num_slots,
            used_blocks=self.index.num_used,
            saved=self.num_saved,
            loaded=self.num_loaded,
            evicted=self.index.num_evicted,
            damaged=self.num_damaged,
            failed=self.num_failed,
            swapped=self.num_swapped,
            late=self.num_late,
            block_bytes=self.block_bytes,
            write_bytes_per_s=self.costs.writes.value or 0.0,
            read_bytes_per_s=self.costs.reads.value or 0.0,
            transport=self.link.transport,
        )

    def below(self, name: str) -> ColdTierStats | None:
        """Figures of a tier below; None where it is not configured."""
        return self.cold.stats(name) if self.cold is not None else None

    def close(self) -> None:
        self.link.close()
        if self.cold is not None:
            self.cold.close()

    # Saves.

    def _save(self, contents: Iterable[tuple[int, BlockContent]]) -> None:
        begun = [(block, self.index.begin_save(content)) for block, content in contents]
        saves = [(block, entry) for block, entry in begun if entry is not None]
        if saves:
            ticket = self.link.write([Move(block, entry.slot) for block, entry in saves], b"")
            self._saves.append(_Save([entry for _, entry in saves], frozenset(block for block, _ in saves), ticket))

    def _end_save(self, save: _Save) -> None:
        if save.ticket.error() is not None:
            self.num_failed += len(save.entries)
            for entry in save.entries:
                self.index.drop(entry)
            return
        self.costs.writes.record(save.ticket.bytes, save.ticket.seconds)
        self.num_saved += len(save.entries)
        for entry, raw in zip(save.entries, save.ticket.sums, strict=True):
            self.index.publish(entry, self._seeded(raw, entry))
            if self.cold is not None:
                self.cold.saved(entry)

    # Loads.

    def _begin_load(self, sequence: Sequence, keep_free: int) -> bool:
        """Send for the blocks that follow those in the cache. False: none are here, or computing them is faster."""
        if sequence.request.params.prompt_logprobs is not None:
            return False  # it computes its whole prompt
        first, entries = self._stored_run(sequence)
        size = self.blocks.block_size
        if not entries or not self.costs.loads(len(entries) * size, len(entries) * self.block_bytes):
            return False
        load = _Load(sequence, sequence.tokens[: (first + len(entries)) * size], first, entries, None, self.clock())
        cached = self.blocks.admit(load, load.tokens, keep_free=keep_free, salt=sequence.request.salt)
        if cached is None:
            return False
        assert cached == first * size, "the prefix was looked up"
        targets = self.blocks.table(load)[first:]
        for entry in entries:
            self.index.pin(entry)
        load.ticket = self.link.read([Move(b, entry.slot) for b, entry in zip(targets, entries, strict=True)], b"")
        self._loads.append(load)
        self._held[sequence] = load
        return True

    def _fetches(self, sequence: Sequence) -> bool:
        """Send for blocks that are only in tiers below. Whether some are on their way."""
        if self.cold is None or sequence.request.params.prompt_logprobs is not None:
            return False
        if not self.cold.knows(sequence):
            self.cold.fetch(sequence, self._contents(sequence)[self._num_findable(sequence) :])
        return self.cold.fetching(sequence)

    def _stored_run(self, sequence: Sequence) -> tuple[int, list[HostEntry]]:
        """Index of the first block that the cache lacks, and the entries from there on without a gap."""
        contents = self._contents(sequence)
        first = self._num_findable(sequence)
        entries: list[HostEntry] = []
        for content in contents[first:]:
            entry = self.index.find(content)
            if entry is None or entry.sum is None:
                break
            entries.append(entry)
        return first, entries

    def _waits_for_save(self, sequence: Sequence) -> bool:
        """Whether the next block is just being saved: after a preemption the sequence comes back at once."""
        contents = self._contents(sequence)
        first = self._num_findable(sequence)
        if first >= len(contents):
            return False
        entry = self.index.find(contents[first])
        return entry is not None and entry.sum is None and not entry.fetching

    def _num_findable(self, sequence: Sequence) -> int:
        """Leading blocks that are in the cache."""
        return self.blocks.num_findable(sequence.tokens, sequence.request.salt)

    def _contents(self, sequence: Sequence) -> list[BlockContent]:
        known = self._known.get(sequence)
        if known is None or known.num_tokens != len(sequence.tokens):
            known = _Known(len(sequence.tokens), self.blocks.digests_of(sequence.tokens, sequence.request.salt))
            self._known[sequence] = known
        return known.contents

    def _end_load(self, load: _Load) -> list[int]:
        """Compare what was loaded and make the sound part findable. Returns free blocks with a damaged content."""
        ticket = load.ticket
        assert ticket is not None, "it has begun"
        failed = ticket.error() is not None
        sound = 0 if failed else self._num_sound(load, ticket.sums)
        if not failed:
            self.costs.reads.record(ticket.bytes, ticket.seconds)
        for entry in reversed(load.entries):
            self.index.unpin(entry)
        if failed:
            self.num_failed += len(load.entries)
        self.num_loaded += sound
        self.blocks.commit(load, load.tokens, (load.first + sound) * self.blocks.block_size)
        if sound == len(load.entries) and load.sequence is not None:
            return []
        if load.sequence is not None:
            del self._held[load.sequence]
        return self.blocks.release(load)

    def _num_sound(self, load: _Load, sums: list[int]) -> int:
        """Number of leading blocks that are what was saved. The others that are not are given up."""
        good = [self._seeded(raw, entry) == entry.sum for entry, raw in zip(load.entries, sums, strict=True)]
        for entry, is_good in zip(load.entries, good, strict=True):
            if not is_good:
                self.num_damaged += 1
                self.index.drop(entry)
        return next((index for index, is_good in enumerate(good) if not is_good), len(good))

    def _expected_bytes(self, load: _Load) -> int:
        """Bytes that should be here by now, at the measured speed."""
        rate = self.costs.reads.value
        return int((self.clock() - load.begun_s) * rate) if rate is not None else 0

    def _seeded(self, raw: int, entry: HostEntry) -> int:
        return seeded(raw, content_seed(self.root, 0, entry.content.digest))
