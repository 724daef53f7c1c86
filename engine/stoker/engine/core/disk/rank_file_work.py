"""One of several ranks: its parts of blocks between its slots and files, in threads, and a report of each end.

Each folder has threads of its own, so that one that hangs holds up no other. Made by `rank_tier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.block_folder import BlockFolder, Files
from stoker.engine.core.disk.file_failure import cause_of
from stoker.engine.core.disk.io_threads import IoThreads
from stoker.engine.core.disk.lane import Lane, take_lane
from stoker.engine.core.disk.slot_files import READERS
from stoker.engine.ranks.block_calls import CallEnded, OpenFiles, OpenLane, ReadPart, RemovePart, Report, WritePart
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.checksum import content_seed, seeded
from stoker.engine.transfer.layout import BlockLayout

CLOSE_S = 5.0


class FolderThreads:
    """One folder, and the threads that wait for its disk."""

    def __init__(self, path: Path, identity: BlockIdentity, files: Files | None) -> None:
        self._path, self._identity, self._files = path, identity, files
        self._lane: Lane | None = None
        self.folder = BlockFolder(path, identity, files)
        self.writer, self.readers = IoThreads(1, "disk writes"), IoThreads(READERS, "disk reads")

    def open_lane(self) -> None:
        """Take a folder of this rank's own below this one, once, and empty it. Raises OSError."""
        if self._lane is None:
            self._lane = take_lane(self._path, self._identity.fingerprint)
            self.folder = BlockFolder(self._lane.path, self._identity, self._files)
        self.folder.prepare()
        for found in self.folder.scan():
            self.folder.remove(found.digest, found.parts)

    def close(self, timeout_s: float) -> None:
        self.writer.close(timeout_s)
        self.readers.close(0.0)
        if self._lane is not None:
            self._lane.close()


class RankFileWork:
    """Writes and reads of one rank."""

    def __init__(
        self, opened: OpenFiles, layout: BlockLayout, slots_SN: np.ndarray, slot_sums: MutableMapping[int, int],
        report: Report, files: Files | None = None,
    ) -> None:  # fmt: skip
        """`layout`: of the rank's part. `slot_sums`: the raw sum of each slot, as saved; what is read is added."""
        self._identity = BlockIdentity(opened.fingerprint, opened.salt, opened.layout)
        self._layout, self._slots_SN, self._slot_sums, self._report = layout, slots_SN, slot_sums, report
        self._files = files
        self._threads: dict[str, FolderThreads] = {}

    def do(self, call: WritePart | ReadPart | OpenLane | RemovePart) -> None:
        """Begin what is called for."""
        threads = self._threads.get(call.folder)
        if threads is None:
            threads = self._threads[call.folder] = FolderThreads(Path(call.folder), self._identity, self._files)
        folder = threads.folder
        match call:
            case OpenLane():
                threads.writer.submit(lambda: self._tell(call.call, threads.open_lane))
            case RemovePart(digest=digest):
                own = (part_of(self._layout),)
                threads.writer.submit(lambda: self._tell(call.call, lambda: folder.remove(digest, own)))
            case WritePart():
                written = BlockContent(call.digest, call.parent, call.tokens)
                threads.writer.submit(lambda: self._tell(call.call, lambda: self._write(folder, written, call.slot)))
            case ReadPart():
                wanted = BlockContent(call.digest, call.parent, call.tokens)
                threads.readers.submit(lambda: self._tell(call.call, lambda: self._read(folder, wanted, call)))

    def _write(self, folder: BlockFolder, content: BlockContent, slot: int) -> int:
        raw = self._slot_sums[slot]
        total = seeded(raw, content_seed(folder.root, 0, content.digest))
        folder.write(content, self._layout, self._slots_SN[slot], total)
        return raw

    def _read(self, folder: BlockFolder, content: BlockContent, call: ReadPart) -> int:
        raw = folder.read(content, call.parts, self._layout, self._slots_SN[call.slot])
        self._slot_sums[call.slot] = raw
        return raw

    def _tell(self, call: int, work: Callable[[], int | None]) -> None:
        """Do something, and report its end with the raw sum of the slot, if it has one."""
        begun_s = time.monotonic()
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - the leader decides what it means
            text = f"{type(error).__name__}: {error}"
            self._report(CallEnded(call, (), 0, time.monotonic() - begun_s, text, cause_of(error)))
            return
        sums = () if found is None else (found,)
        moved = self._layout.block_bytes if sums else 0
        self._report(CallEnded(call, sums, moved, time.monotonic() - begun_s, ""))

    def close(self) -> None:
        """End after the writes that were begun, but do not wait for a disk that hangs."""
        for threads in self._threads.values():
            threads.close(CLOSE_S)
