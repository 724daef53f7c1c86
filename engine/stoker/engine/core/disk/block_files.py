"""What carries blocks between the host tier's slots and the files of one volume."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from stoker.engine.core.disk.block_folder import BlockFolder
from stoker.engine.core.host_index import HostEntry
from stoker.engine.transfer.block_part import Parts


class BlockFiles(Protocol):
    """For the core's thread. No method waits."""

    parts: Parts
    """The parts in which it writes a block."""

    def write(self, folder: BlockFolder, entry: HostEntry) -> Future[None]:
        """Begin to write a block of the host tier, which stays where it is until then."""
        ...

    def read(self, folder: BlockFolder, entry: HostEntry, parts: Parts) -> Future[int]:
        """Begin to read a block into the entry's slot, from the parts that are there. Its result: the seeded sum."""
        ...

    def poll(self) -> None:
        """Take up what has ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """End after what was begun; do not wait for longer."""
        ...
