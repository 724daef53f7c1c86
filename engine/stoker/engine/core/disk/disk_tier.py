"""The disk tier: blocks of the host tier in files, for as long as there is room, also over a restart of the engine.

Every call that touches a file runs in a thread. The core's thread posts reads and writes, and takes up their ends
(`poll`). A disk that is full, fails or hangs costs nothing but its blocks: writes or reads pause (`breaker`), and what
is not read is computed. A damaged or foreign file is counted and removed.

Called by `cold_traffic` in the core's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.block_folder import BlockFolder, Files, Found, file_bytes
from stoker.engine.core.disk.breaker import Breaker
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.disk_index import DiskIndex
from stoker.engine.core.disk.io_threads import IoThreads
from stoker.engine.core.disk.lane import Lane, remove_unused, take_lane
from stoker.engine.core.host_index import HostEntry
from stoker.engine.core.stats import ColdTierStats
from stoker.engine.core.tier_costs import Rate
from stoker.engine.transfer.landing_zone import BlockRefused
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.ticket import TransferError

log = logging.getLogger("stoker.engine")

READERS = 2
MOST_WRITES = 16
"""Writes that are begun and have not ended."""
HANGS_S = 10.0
"""Age of a read or write from which no other is begun: the disk hangs."""
CLEAN_EVERY_S = 300.0
"""Time between two looks for folders that no engine uses."""
CLOSE_S = 5.0
"""Longest wait for writes at the end."""


class Opened(NamedTuple):
    """A folder that is ready."""

    lane: Lane
    folder: BlockFolder
    found: list[Found]


@dataclass(eq=False)
class _Work:
    """A read or write that was begun."""

    entry: HostEntry
    begun_s: float


class DiskTier:
    """Blocks of one engine on one disk."""

    name = "disk"

    def __init__(
        self, path: Path, identity: BlockIdentity, max_blocks: int, slots_SN: np.ndarray, clock: Callable[[], float],
        files: Files | None = None,
    ) -> None:  # fmt: skip
        """`slots_SN`: the host tier's memory."""
        self.path, self.identity, self.files, self.slots_SN, self.clock = path, identity, files, slots_SN, clock
        self.index = DiskIndex(max_blocks)
        self.writing, self.reading = Breaker(clock), Breaker(clock)
        self._writer, self._readers = IoThreads(1, "disk writes"), IoThreads(READERS, "disk reads")
        self._folder: BlockFolder | None = None
        self._lane: Lane | None = None
        self._opening: Future[Opened] | None = None
        self._cleaning: Future[int] | None = None
        self._clean_due_s = clock()
        self._writes: dict[Future[None], _Work] = {}
        self._reads: dict[Future[int], _Work] = {}
        self._removals: dict[Future[None], bytes] = {}
        self._unremoved: list[bytes] = []
        self._write_rate, self._read_rate = Rate(), Rate()
        self.num_saved = self.num_loaded = self.num_damaged = self.num_foreign = self.num_failed = 0
        self.num_found = self.num_cleaned = 0
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
        if not self.index.begin_write(digest):
            return False
        assert entry.sum is not None, "it is complete"
        call = partial(self._folder.write, entry.content, self.slots_SN[entry.slot], entry.sum)
        self._writes[self._writer.submit(call)] = _Work(entry, self.clock())
        return True

    def read(self, entry: HostEntry) -> None:
        """Begin to read a block into a slot of the host tier."""
        assert self._folder is not None, "it holds the block"
        self.index.pin(entry.content.digest)
        call = partial(self._folder.read, entry.content, self.slots_SN[entry.slot])
        self._reads[self._readers.submit(call)] = _Work(entry, self.clock())

    def poll(self) -> tuple[list[HostEntry], list[ReadEnd]]:
        """Take up what has ended: blocks that were written or given up, and those that were read or not."""
        self._follow_opening()
        self._clean_when_due()
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
        for threads in (self._writer, self._readers):
            threads.close(0.0 if hangs else CLOSE_S)
        if self._opening is not None and self._opening.done() and self._opening.exception() is None:
            self._lane = self._opening.result().lane
        if self._lane is not None:
            self._lane.close()

    # Life of the folder.

    def _open(self) -> None:
        self._opening = self._writer.submit(partial(_open_folder, self.path, self.identity, self.files))

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
        self._lane, self._folder, found = opening.result()
        self.writing.worked()
        self.index.adopt(one.digest for one in found)
        self.num_found = len(found)
        for removed in self.index.make_room(0):
            self._remove(removed)

    def _clean_when_due(self) -> None:
        if self._cleaning is not None and self._cleaning.done():
            cleaning, self._cleaning = self._cleaning, None
            self.num_cleaned += 0 if cleaning.exception() is not None else cleaning.result()
        if self._lane is None or self._cleaning is not None or self.clock() < self._clean_due_s:
            return
        self._clean_due_s = self.clock() + CLEAN_EVERY_S
        self._cleaning = self._readers.submit(partial(_clean, self._lane, self.path, self.identity.fingerprint))

    # Ends.

    def _remove(self, digest: bytes) -> None:
        assert self._folder is not None, "it has the block"
        self._removals[self._writer.submit(partial(self._folder.remove, digest))] = digest

    def _end_removal(self, removal: Future[None]) -> None:
        digest = self._removals.pop(removal)
        error = removal.exception()
        if error is not None:
            self._failed(self.writing, error)
            self._unremoved.append(digest)  # its room stays taken: the file may be there
            return
        self.index.removed(digest)

    def _end_write(self, write: Future[None]) -> HostEntry:
        work = self._writes.pop(write)
        error = write.exception()
        self.index.end_write(work.entry.content.digest, complete=error is None)
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
        """Count what could not be read, and give it up."""
        if isinstance(error, LayoutMismatch):
            self.num_foreign += 1
        elif isinstance(error, TransferError | BlockRefused):
            self.num_damaged += 1
        elif isinstance(error, FileNotFoundError):
            self.num_failed += 1  # of this block alone
        else:
            self._failed(self.reading, error)
        log.warning("a block of the disk tier is given up: %s", error)
        if self.index.drop(digest):
            self._remove(digest)

    def _failed(self, breaker: Breaker, error: BaseException) -> None:
        self.num_failed += 1
        breaker.failed(f"{type(error).__name__}: {error}")

    def _hangs(self, works: Iterable[_Work]) -> bool:
        return any(self.clock() - work.begun_s > HANGS_S for work in works)

    @property
    def _file_bytes(self) -> int:
        return file_bytes(self.identity)


def _open_folder(path: Path, identity: BlockIdentity, files: Files | None) -> Opened:
    """Lock a folder and list its blocks. Raises OSError."""
    lane = take_lane(path, identity.fingerprint)
    try:
        folder = BlockFolder(lane.path, identity, files)
        folder.prepare()
        return Opened(lane, folder, folder.scan())
    except BaseException:
        lane.close()
        raise


def _clean(lane: Lane, path: Path, fingerprint: bytes) -> int:
    lane.renew()
    return remove_unused(path, fingerprint, time.time())
