"""The folder of one engine as the home of its disk tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_files import BlockFiles
from stoker.engine.core.disk.block_folder import BlockFolder, Files, Stored, file_bytes
from stoker.engine.core.disk.disk_index import DiskIndex
from stoker.engine.core.disk.disk_tier import DiskTier, Tended
from stoker.engine.core.disk.lane import Lane, remove_unused, take_lane


class LaneHome:
    """A folder that only this engine uses."""

    tend_every_s = 300.0

    def __init__(self, path: Path, identity: BlockIdentity, files: Files | None = None) -> None:
        self.path, self.identity, self.files = path, identity, files
        self._lane: Lane | None = None

    def open(self) -> tuple[BlockFolder, Sequence[Stored]]:
        self.close()
        self._lane = take_lane(self.path, self.identity.fingerprint)
        folder = BlockFolder(self._lane.path, self.identity, self.files)
        folder.prepare()
        return folder, list(whole_blocks(folder))

    def tend(self) -> Tended:
        """Keep the folder, and remove those that no engine uses."""
        if self._lane is not None:
            self._lane.renew()
        return Tended(remove_unused(self.path, self.identity.fingerprint, time.time()))

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()


def whole_blocks(folder: BlockFolder) -> Iterator[Stored]:
    """The blocks of a folder that no one writes to. Parts of what was not finished are removed. Raises OSError."""
    for found in folder.scan():
        parts = folder.complete(found.parts)
        folder.remove(found.digest, tuple(part for part in found.parts if part not in (parts or ())))
        if parts is not None:
            yield Stored(found.digest, parts)


def disk_tier(
    path: Path, identity: BlockIdentity, max_blocks: int, blocks: BlockFiles, clock: Callable[[], float],
    files: Files | None = None,
) -> DiskTier:  # fmt: skip
    """Begin to open the disk tier of an engine. `blocks`: carries its blocks."""
    size = file_bytes(identity, blocks.parts)
    return DiskTier(LaneHome(path, identity, files), DiskIndex(max_blocks), blocks, size, clock)
