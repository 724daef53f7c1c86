"""What the host tier holds: slots of main memory by content, the least recently used given up first. Pure.

    FREE -> SAVING -> STORED -> FREE

An entry can be found only when its copy is complete (`publish`). One that is being loaded, or written to a tier below,
is pinned and stays. When more than `HIGH` of the slots are taken, the oldest are given up until `LOW` are left, so that
saves find room.

Changed by `host_tier` alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.engine.core.blocks import BlockContent

HIGH = 0.90
LOW = 0.85


@dataclass(eq=False)
class HostEntry:
    """One content in one slot."""

    content: BlockContent
    slot: int
    sum: int | None = None
    """Seeded checksum; None while it is being saved."""
    pins: int = 0
    """Loads and writes to a tier below that are under way."""
    fetching: bool = False
    """It is being filled from a tier below, not from the cache."""
    dropped: bool = False
    """Given up while it was pinned: its slot comes free with the last pin."""


class HostIndex:
    """Slots and entries. Every operation but `audit` costs O(entries it touches)."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: OrderedDict[bytes, HostEntry] = OrderedDict()
        """By digest, the least recently used first."""
        self._leaving: set[HostEntry] = set()

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_pins(self) -> int:
        return sum(entry.pins for entry in (*self._entries.values(), *self._leaving))

    def begin_save(self, content: BlockContent) -> HostEntry | None:
        """Take a slot for a content. None: it is there already, or all slots are in use."""
        known = self._entries.get(content.digest)
        if known is not None:
            self._entries.move_to_end(content.digest)
            return None
        self._make_room()
        if not self._free:
            return None
        entry = HostEntry(content, self._free.pop())
        self._entries[content.digest] = entry
        return entry

    def publish(self, entry: HostEntry, total: int) -> None:
        """The copy is complete: from now on it can be found."""
        if not entry.dropped:
            entry.sum = total

    def drop(self, entry: HostEntry) -> None:
        """Give an entry up: its copy failed or is damaged. Harmless for one that has gone."""
        if self._entries.get(entry.content.digest) is entry:
            del self._entries[entry.content.digest]
            entry.dropped = True
            self._leaving.add(entry)
        self._free_if_unused(entry)

    def find(self, content: BlockContent) -> HostEntry | None:
        """The entry of a content, complete or not. Tokens and parent are compared, not only the digest."""
        entry = self._entries.get(content.digest)
        return entry if entry is not None and entry.content == content else None

    def pin(self, entry: HostEntry) -> None:
        entry.pins += 1

    def unpin(self, entry: HostEntry, *, used: bool = True) -> None:
        """End a load, after which the entry counts as used now, or a write."""
        entry.pins -= 1
        if used and not entry.dropped:
            self._entries.move_to_end(entry.content.digest)
        self._free_if_unused(entry)

    def faults(self) -> Iterator[str]:
        """Count every slot anew: each is free or taken by one entry."""
        taken = [entry.slot for entry in (*self._entries.values(), *self._leaving)]
        if sorted([*taken, *self._free]) != list(range(self.num_slots)):
            yield "a slot of the host tier is neither free nor taken, or taken twice"
        if any(entry.pins < 0 or (entry.pins and entry.sum is None) for entry in self._entries.values()):
            yield "an entry of the host tier is loaded that is not stored"

    def _make_room(self) -> None:
        if self.num_used < max(HIGH * self.num_slots, 1):
            return
        target = min(int(LOW * self.num_slots), self.num_slots - 1)
        for entry in [entry for entry in self._entries.values() if entry.sum is not None and not entry.pins]:
            if self.num_used <= target:
                return
            self.drop(entry)
            self.num_evicted += 1

    def _free_if_unused(self, entry: HostEntry) -> None:
        if entry in self._leaving and not entry.pins:
            self._leaving.remove(entry)
            self._free.append(entry.slot)
