"""Blocks between the slots of an engine of one rank and files, in threads of its own."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import BlockFolder
from stoker.engine.core.disk.io_threads import IoThreads
from stoker.engine.core.host_index import HostEntry
from stoker.engine.transfer.block_part import Parts, part_of
from stoker.engine.transfer.checksum import content_seed, seeded

READERS = 2


class SlotFiles:
    """Whole blocks, one file each."""

    def __init__(self, identity: BlockIdentity, slots_SN: np.ndarray) -> None:
        """`slots_SN`: the host tier's memory."""
        self.layout, self.root, self.slots_SN = identity.layout, identity.root, slots_SN
        self.parts: Parts = (part_of(identity.layout),)
        self._writer, self._readers = IoThreads(1, "disk writes"), IoThreads(READERS, "disk reads")

    def write(self, folder: BlockFolder, entry: HostEntry) -> Future[None]:
        total = entry.sum
        assert total is not None, "it is complete"
        slot_N = self.slots_SN[entry.slot]
        return self._writer.submit(lambda: folder.write(entry.content, self.layout, slot_N, total))

    def read(self, folder: BlockFolder, entry: HostEntry, parts: Parts) -> Future[int]:
        slot_N, seed = self.slots_SN[entry.slot], content_seed(self.root, 0, entry.content.digest)
        return self._readers.submit(lambda: seeded(folder.read(entry.content, parts, self.layout, slot_N), seed))

    def poll(self) -> None:
        """The threads end what they do by themselves."""

    def close(self, timeout_s: float) -> None:
        for threads in (self._writer, self._readers):
            threads.close(timeout_s)
