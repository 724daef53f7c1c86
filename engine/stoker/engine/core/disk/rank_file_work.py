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
from stoker.engine.core.disk.slot_files import READERS
from stoker.engine.ranks.block_calls import CallEnded, OpenFiles, ReadPart, Report, WritePart
from stoker.engine.transfer.checksum import content_seed, seeded
from stoker.engine.transfer.layout import BlockLayout

CLOSE_S = 5.0


class FolderThreads:
    """One folder, and the threads that wait for its disk."""

    def __init__(self, path: Path, identity: BlockIdentity, files: Files | None) -> None:
        self.folder = BlockFolder(path, identity, files)
        self.writer, self.readers = IoThreads(1, "disk writes"), IoThreads(READERS, "disk reads")

    def close(self, timeout_s: float) -> None:
        self.writer.close(timeout_s)
        self.readers.close(0.0)


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

    def do(self, call: WritePart | ReadPart) -> None:
        """Begin a write or a read."""
        threads = self._threads.get(call.folder)
        if threads is None:
            threads = self._threads[call.folder] = FolderThreads(Path(call.folder), self._identity, self._files)
        folder, content = threads.folder, BlockContent(call.digest, call.parent, call.tokens)
        if isinstance(call, WritePart):
            threads.writer.submit(lambda: self._tell(call.call, lambda: self._write(folder, content, call.slot)))
        else:
            threads.readers.submit(lambda: self._tell(call.call, lambda: self._read(folder, content, call)))

    def _write(self, folder: BlockFolder, content: BlockContent, slot: int) -> int:
        raw = self._slot_sums[slot]
        total = seeded(raw, content_seed(folder.root, 0, content.digest))
        folder.write(content, self._layout, self._slots_SN[slot], total)
        return raw

    def _read(self, folder: BlockFolder, content: BlockContent, call: ReadPart) -> int:
        raw = folder.read(content, call.parts, self._layout, self._slots_SN[call.slot])
        self._slot_sums[call.slot] = raw
        return raw

    def _tell(self, call: int, work: Callable[[], int]) -> None:
        """Do something, and report its end with the raw sum of the slot."""
        begun_s = time.monotonic()
        try:
            sums = (work(),)
        except Exception as error:  # noqa: BLE001 - the leader decides what it means
            text = f"{type(error).__name__}: {error}"
            self._report(CallEnded(call, (), 0, time.monotonic() - begun_s, text, cause_of(error)))
            return
        self._report(CallEnded(call, sums, self._layout.block_bytes, time.monotonic() - begun_s, ""))

    def close(self) -> None:
        """End after the writes that were begun, but do not wait for a disk that hangs."""
        for threads in self._threads.values():
            threads.close(CLOSE_S)
