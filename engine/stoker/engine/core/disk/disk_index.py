"""Which blocks are on the disk, within a number of bytes; the least recently used are given up first. Pure.

    ABSENT -> WRITING -> STORED -> LEAVING -> ABSENT

A block can be found only when it is complete, and its room counts until its file is gone. One that is being read is
pinned and stays. When more than `HIGH` of the room is taken, the oldest are given up until `LOW` is left, so that
writes find room.

Changed by `disk_tier` alone, in the core's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from stoker.engine.core.disk.block_folder import Stored
from stoker.engine.transfer.block_part import Parts

HIGH = 0.90
LOW = 0.85


class DiskIndex:
    """Blocks of one size, by digest. Every operation but `faults` costs O(blocks that it touches)."""

    owned = True

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_evicted = 0
        self._stored: OrderedDict[bytes, Parts] = OrderedDict()
        """The parts of each, the least recently used first."""
        self._writing: set[bytes] = set()
        self._leaving: set[bytes] = set()
        self._pins: Counter[bytes] = Counter()

    @property
    def num_used(self) -> int:
        """Blocks whose room is taken, whether they can be found or not."""
        return len(self._stored) + len(self._writing) + len(self._leaving)

    @property
    def num_stored(self) -> int:
        return len(self._stored)

    def has(self, digest: bytes) -> bool:
        """Whether it is complete."""
        return digest in self._stored

    def parts(self, digest: bytes) -> Parts:
        """The parts in which a complete block is there."""
        return self._stored[digest]

    def begin_scan(self) -> None:
        """Nothing to note: no other engine changes the folder."""

    def adopt(self, blocks: Iterable[Stored]) -> None:
        """Take up complete blocks that were found, the least recently used first."""
        self._stored = OrderedDict({**dict(blocks), **self._stored})

    def make_room(self, num_blocks: int = 1) -> list[Stored]:
        """Give up the oldest, where more than `HIGH` would be taken. Returns blocks whose files are to be removed."""
        taken = len(self._stored) + len(self._writing) + num_blocks
        if taken <= HIGH * self.max_blocks:
            return []
        free = [digest for digest in self._stored if digest not in self._pins]
        given_up = [Stored(digest, self._stored[digest]) for digest in free[: taken - int(LOW * self.max_blocks)]]
        for one in given_up:
            self.drop(one.digest)
        self.num_evicted += len(given_up)
        return given_up

    def begin_write(self, digest: bytes) -> bool:
        """Take room for a block. False: it is there or on its way, or there is no room before files are removed."""
        if digest in self._stored:
            self._stored.move_to_end(digest)
            return False
        if digest in self._writing or digest in self._leaving or self.num_used >= self.max_blocks:
            return False
        self._writing.add(digest)
        return True

    def end_write(self, digest: bytes, parts: Parts | None) -> None:
        """Make a block findable, or, without parts, give its room back."""
        self._writing.remove(digest)
        if parts is not None:
            self._stored[digest] = parts

    def pin(self, digest: bytes) -> None:
        """Keep a block while it is read."""
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        """End a read. The block counts as used now."""
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
        if digest in self._stored:
            self._stored.move_to_end(digest)

    def drop(self, digest: bytes) -> bool:
        """Give a complete block up. Whether its file is to be removed."""
        if digest not in self._stored:
            return False
        del self._stored[digest]
        self._leaving.add(digest)
        return True

    def removed(self, digest: bytes) -> None:
        """Its file is gone."""
        self._leaving.discard(digest)

    def faults(self) -> Iterator[str]:
        """Count every block anew: each is in one state, and all are within the size."""
        states = (self._stored.keys(), self._writing, self._leaving)
        if len(set().union(*states)) != self.num_used:
            yield "a block on the disk is in two states"
        if self.num_used - len(self._leaving) > self.max_blocks:
            yield "the disk tier holds more than its size"
