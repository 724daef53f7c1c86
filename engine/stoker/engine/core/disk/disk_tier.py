"""Blocks of the host tier in the files of one volume, for as long as there is room, also over a restart of the engine.

The disk tier is one of these over a folder of the engine's own (`lane_home`); a store has one for each volume
(`store_tier`, `shared_home`).

Every call that touches a file runs in a thread. The core's thread posts reads and writes, and takes up their ends
(`poll`). A disk that is full, fails or hangs costs nothing but its blocks: writes or reads pause (`breaker`), and what
is not read is computed. A damaged or foreign file is counted and removed.

Called by `cold_traffic` or `store_tier` in the core's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.block_files import BlockFiles
from stoker.engine.core.disk.block_folder import BlockFolder, Stored
from stoker.engine.core.disk.breaker import Breaker
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.file_failure import FileFailed, cause_of
from stoker.engine.core.disk.io_threads import IoThreads
from stoker.engine.core.host_index import HostEntry
from stoker.engine.core.stats import ColdTierStats
from stoker.engine.core.tier_costs import Rate
from stoker.engine.transfer.block_part import Parts

log = logging.getLogger("stoker.engine")

MOST_WRITES = 16
"""Writes that are begun and have not ended."""
HANGS_S = 10.0
"""Age of a read or write from which no other is begun: the disk hangs."""
CLOSE_S = 5.0
"""Longest wait for writes at the end."""


class Tended(NamedTuple):
    """What a regular look at the volume found."""

    num_cleaned: int = 0
    """Folders that were removed."""
    found: Collection[Stored] | None = None
    """All blocks that are there; None: nothing is new."""


class Home(Protocol):
    """Where the files are. Its methods may wait for the disk."""

    tend_every_s: float

    def open(self) -> tuple[BlockFolder, Sequence[Stored]]:
        """Make the folder ready, and list its blocks, the least recently used first. Raises OSError."""
        ...

    def tend(self) -> Tended:
        """Do what is regularly to be done. Raises OSError."""
        ...

    def close(self) -> None:
        """Let others have it."""
        ...


class Index(Protocol):
    """What is in the folder (`disk_index`, `shared_index`)."""

    owned: bool
    """Whether no other engine uses the files."""
    max_blocks: int
    num_evicted: int

    @property
    def num_used(self) -> int: ...

    @property
    def num_stored(self) -> int: ...

    def has(self, digest: bytes) -> bool: ...

    def parts(self, digest: bytes) -> Parts: ...

    def begin_scan(self) -> None: ...

    def adopt(self, blocks: Iterable[Stored]) -> None: ...

    def make_room(self, num_blocks: int = 1) -> list[Stored]: ...

    def begin_write(self, digest: bytes) -> bool: ...

    def end_write(self, digest: bytes, parts: Parts | None) -> None: ...

    def pin(self, digest: bytes) -> None: ...

    def unpin(self, digest: bytes) -> None: ...

    def drop(self, digest: bytes) -> bool: ...

    def removed(self, digest: bytes) -> None: ...

    def faults(self) -> Iterator[str]: ...


@dataclass(eq=False)
class _Work:
    """A read or write that was begun."""

    entry: HostEntry
    begun_s: float


class DiskTier:
    """Blocks of one engine on one volume."""

    name = "disk"

    def __init__(
        self, home: Home, index: Index, blocks: BlockFiles, file_bytes: int, clock: Callable[[], float]
    ) -> None:
        """`blocks`: carries them between the host tier and files. `file_bytes`: room of one."""
        self.home, self.index, self.blocks, self.clock = home, index, blocks, clock
        self._file_bytes = file_bytes
        self.writing, self.reading = Breaker(clock), Breaker(clock)
        self._keeper, self._tender = IoThreads(1, "disk files"), IoThreads(1, "disk care")
        self._folder: BlockFolder | None = None
        self._opening: Future[tuple[BlockFolder, Sequence[Stored]]] | None = None
        self._tending: Future[Tended] | None = None
        self._tend_due_s = clock()
        self._writes: dict[Future[None], _Work] = {}
        self._reads: dict[Future[int], _Work] = {}
        self._removals: dict[Future[None], Stored] = {}
        self._unremoved: list[Stored] = []
        self._leaving: set[bytes] = set()
        """Blocks whose files are being removed: one that was written now might go with them."""
        self._write_rate, self._read_rate = Rate(), Rate()
        self.num_saved = self.num_loaded = self.num_damaged = self.num_foreign = self.num_failed = 0
        self.num_found = self.num_cleaned = self.num_tended = 0
        self._open()

    # Called by the traffic.

    @property
    def readable(self) -> bool:
        """Whether reads may be begun now."""
        return self._folder is not None and self.reading.open and not self._hangs(self._reads.values())

    def holds(self, content: BlockContent) -> bool:
        """Whether it is there. Tokens and parent are compared when it is read."""
        return self.index.has(content.digest)

    def room(self) -> int:
        """Writes that may be begun now."""
        if self._folder is None or not self.writing.open or self._hangs(self._writes.values()):
            return 0
        return MOST_WRITES - len(self._writes)

    def write(self, entry: HostEntry) -> bool:
        """Begin to write a block of the host tier, which stays where it is until then. False: it is not written."""
        assert self._folder is not None, "there is room"
        digest = entry.content.digest
        if not self.index.has(digest):
            for removed in self.index.make_room():
                self._remove(removed)
        if digest in self._leaving or not self.index.begin_write(digest):
            return False
        self._writes[self.blocks.write(self._folder, entry)] = _Work(entry, self.clock())
        return True

    def read(self, entry: HostEntry) -> None:
        """Begin to read a block into a slot of the host tier."""
        assert self._folder is not None, "it holds the block"
        digest = entry.content.digest
        self.index.pin(digest)
        reading = self.blocks.read(self._folder, entry, self.index.parts(digest))
        self._reads[reading] = _Work(entry, self.clock())

    def poll(self) -> tuple[list[HostEntry], list[ReadEnd]]:
        """Take up what has ended: blocks that were written or given up, and those that were read or not."""
        self.blocks.poll()
        self._follow_opening()
        self._tend_when_due()
        while self._unremoved and self.writing.open:
            self._remove(self._unremoved.pop())
        for removal in [removal for removal in self._removals if removal.done()]:
            self._end_removal(removal)
        written = [self._end_write(write) for write in [write for write in self._writes if write.done()]]
        read = [self._end_read(read) for read in [read for read in self._reads if read.done()]]
        return written, read

    def pending(self) -> list[Future[int]]:
        """Reads under way."""
        return list(self._reads)

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._writes or self._reads or self._removals or self._opening)

    def faults(self) -> Iterator[str]:
        """Findings of an audit."""
        yield from self.index.faults()

    def stats(self) -> ColdTierStats:
        size = self._file_bytes
        return ColdTierStats(
            state=self.state, total_bytes=self.index.max_blocks * size, used_bytes=self.index.num_used * size,
            blocks=self.index.num_stored, found=self.num_found, saved=self.num_saved, loaded=self.num_loaded,
            evicted=self.index.num_evicted, damaged=self.num_damaged, foreign=self.num_foreign,
            failed=self.num_failed, cleaned=self.num_cleaned, late=0,
            write_bytes_per_s=self._write_rate.value or 0.0, read_bytes_per_s=self._read_rate.value or 0.0,
        )  # fmt: skip

    @property
    def state(self) -> str:
        """`ok`, or what is the matter."""
        if self._hangs([*self._writes.values(), *self._reads.values()]):
            return f"hangs for more than {HANGS_S:.0f} s"
        if self.writing.reason or self.reading.reason:
            return "; ".join(filter(None, (self.writing.reason, self.reading.reason)))
        return "ok" if self._folder is not None else "opening"

    def close(self) -> None:
        """End after what was begun, but do not wait for a disk that hangs."""
        hangs = self._hangs([*self._writes.values(), *self._reads.values()])
        for read in self._reads:
            read.cancel()
        self.blocks.close(0.0 if hangs else CLOSE_S)
        self._keeper.close(0.0 if hangs else CLOSE_S)
        self._tender.close(0.0)
        self.home.close()

    # Life of the folder.

    def _open(self) -> None:
        self._opening = self._keeper.submit(self.home.open)

    def _follow_opening(self) -> None:
        if self._opening is None and self._folder is None and self.writing.open:
            self._open()
        if self._opening is None or not self._opening.done():
            return
        opening, self._opening = self._opening, None
        error = opening.exception()
        if error is not None:
            self._failed(self.writing, error)
            return
        self._folder, found = opening.result()
        self.writing.worked()
        self.index.adopt(found)
        self.num_found = len(found)
        for removed in self.index.make_room(0):
            self._remove(removed)

    def tend_now(self) -> bool:
        """Have the next look at the volume now. False: it is not open."""
        self._tend_due_s = self.clock()
        return self._folder is not None

    def _tend_when_due(self) -> None:
        if self._tending is not None and self._tending.done():
            tending, self._tending = self._tending, None
            self._end_tending(tending)
        if self._folder is None or self._tending is not None or self.clock() < self._tend_due_s:
            return
        self._tend_due_s = self.clock() + self.home.tend_every_s
        self.index.begin_scan()
        self._tending = self._tender.submit(self.home.tend)

    def _end_tending(self, tending: Future[Tended]) -> None:
        self.num_tended += 1
        error = tending.exception()
        if error is not None:
            self._failed(self.reading, error)
            return
        tended = tending.result()
        self.num_cleaned += tended.num_cleaned
        if tended.found is not None:
            self.index.adopt(tended.found)

    # Ends.

    def _remove(self, block: Stored) -> None:
        assert self._folder is not None, "it has the block"
        self._leaving.add(block.digest)
        self._removals[self._keeper.submit(partial(self._folder.remove, *block))] = block

    def _end_removal(self, removal: Future[None]) -> None:
        block = self._removals.pop(removal)
        error = removal.exception()
        if error is not None:
            self._failed(self.writing, error)
            self._unremoved.append(block)  # its room stays taken: the file may be there
            return
        self._leaving.discard(block.digest)
        self.index.removed(block.digest)

    def _end_write(self, write: Future[None]) -> HostEntry:
        work = self._writes.pop(write)
        error = write.exception()
        self.index.end_write(work.entry.content.digest, self.blocks.parts if error is None else None)
        if error is not None:
            self._failed(self.writing, error)
            return work.entry
        self.writing.worked()
        self.num_saved += 1
        self._write_rate.record(self._file_bytes, self.clock() - work.begun_s)
        return work.entry

    def _end_read(self, read: Future[int]) -> ReadEnd:
        work = self._reads.pop(read)
        digest = work.entry.content.digest
        self.index.unpin(digest)
        error = None if read.cancelled() else read.exception()
        if error is None:
            self.reading.worked()
            self.num_loaded += 1
            self._read_rate.record(self._file_bytes, self.clock() - work.begun_s)
            return ReadEnd(work.entry, read.result())
        self._refuse(digest, error)
        return ReadEnd(work.entry, None)

    def _refuse(self, digest: bytes, error: BaseException) -> None:
        """Count what could not be read, and give it up. Others may still read what a failing disk did not give."""
        cause = cause_of(error)
        if cause == "foreign":
            self.num_foreign += 1
        elif cause == "damaged":
            self.num_damaged += 1
        elif cause == "missing":
            self.num_failed += 1  # of this block alone
        else:
            self._failed(self.reading, error)
        log.warning("a block of the %s tier is given up: %s", self.name, error)
        parts = self.index.parts(digest) if self.index.has(digest) else ()
        if self.index.drop(digest) and (cause in ("foreign", "damaged") or self.index.owned):
            self._remove(Stored(digest, parts))

    def _failed(self, breaker: Breaker, error: BaseException) -> None:
        self.num_failed += 1
        breaker.failed(str(error) if isinstance(error, FileFailed) else f"{type(error).__name__}: {error}")

    def _hangs(self, works: Iterable[_Work]) -> bool:
        return any(self.clock() - work.begun_s > HANGS_S for work in works)
