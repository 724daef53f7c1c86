"""The disk tier of one copy of the model over several pods: each rank keeps its parts on its own node's disk.

No pod sees the files of another. So each rank takes a folder of its own and begins it empty; which blocks are kept is
the leader's to decide, as elsewhere. A block is there when every rank has written its part, and it is read when every
rank has read its own: one that is missing or damaged at any of them is given up at all.

Folders are opened, and files removed, at the request of threads that may wait. The core's thread passes these requests
on to the ranks (`poll`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import BlockFolder, Stored, file_bytes
from stoker.engine.core.disk.disk_index import DiskIndex
from stoker.engine.core.disk.disk_tier import DiskTier, Tended
from stoker.engine.core.disk.lane import remove_unused
from stoker.engine.core.disk.rank_files import FileCall, JointCall, RankFiles
from stoker.engine.core.host_index import HostEntry
from stoker.engine.ranks.block_calls import OpenLane, RemovePart
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.transfer.block_part import Parts, part_of
from stoker.engine.transfer.layout import BlockLayout

OPEN_S = 60.0
REMOVE_S = 10.0
"""Longest wait for the ranks, after which a disk counts as failed and is tried again later."""


class RankLanes(RankFiles):
    """The parts of blocks, one file of each rank."""

    def __init__(self, calls: RankCalls, layouts: Sequence[BlockLayout], root: bytes) -> None:
        super().__init__(calls, layouts, root)
        self._writers = self._ranks
        self._asked: SimpleQueue[tuple[JointCall[None], FileCall]] = SimpleQueue()
        self._closed = False

    def write(self, folder: BlockFolder, entry: HostEntry) -> Future[None]:
        """As everywhere; a block that a rank could not write leaves nothing at the others."""
        writing = super().write(folder, entry)

        def give_back(ended: Future[None]) -> None:
            if ended.exception() is not None and not self._closed:
                joint = JointCall[None](self._ranks, lambda _: None)
                remove = partial(_remove, str(folder.path), entry.content.digest)
                self._begin(joint, dict.fromkeys(self._ranks, remove))

        writing.add_done_callback(give_back)
        return writing

    def read_by(self, rank: int, parts: Parts) -> Parts:  # noqa: ARG002 - a rank sees its own files alone
        return (part_of(self.layouts[rank]),)

    def ask(self, call: FileCall) -> Future[None]:
        """Have every rank do this. May be called by any thread."""
        joint = JointCall[None](self._ranks, lambda _: None)
        self._asked.put((joint, call))
        if self._closed:
            self._refuse_asked()
        return joint.future

    def poll(self) -> None:
        with suppress(Empty):
            while True:
                joint, call = self._asked.get_nowait()
                self._begin(joint, dict.fromkeys(self._ranks, call))
        super().poll()

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self._refuse_asked()
        super().close(timeout_s)
        for unended in list(self._open):
            unended.set_exception(OSError("the engine ends"))  # what waits for it ends, too

    def _refuse_asked(self) -> None:
        with suppress(Empty):
            while True:
                joint, _ = self._asked.get_nowait()
                joint.future.set_exception(OSError("the engine ends"))

    def file_bytes(self, identity: BlockIdentity, pods: int) -> int:
        """Room of one block on the disk of the pod that needs most."""
        parts = [part_of(layout) for layout in self.layouts]
        here = len(parts) // pods
        return max(file_bytes(identity, tuple(parts[first : first + here])) for first in range(0, len(parts), here))


class RankLaneFolder(BlockFolder):
    """The folders of all ranks, named by what they lie below."""

    def __init__(self, path: Path, identity: BlockIdentity, lanes: RankLanes) -> None:
        super().__init__(path, identity)
        self._lanes = lanes

    def remove(self, digest: bytes, parts: Parts) -> None:  # noqa: ARG002 - each rank has one
        """Remove a block at every rank. Raises OSError."""
        self._lanes.ask(partial(_remove, str(self.path), digest)).result(REMOVE_S)


class RankLaneHome:
    """Folders that only these ranks use."""

    tend_every_s = 300.0

    def __init__(self, path: Path, identity: BlockIdentity, lanes: RankLanes) -> None:
        self.path, self.identity, self.lanes = path, identity, lanes

    def open(self) -> tuple[BlockFolder, Sequence[Stored]]:
        """Have every rank begin an empty folder: no pod knows whether the others still have what belongs together."""
        self.lanes.ask(partial(_open, str(self.path))).result(OPEN_S)
        return RankLaneFolder(self.path, self.identity, self.lanes), ()

    def tend(self) -> Tended:
        """Remove folders that no engine uses, where this pod's volume has some."""
        return Tended(remove_unused(self.path, self.identity.fingerprint, time.time()))

    def close(self) -> None:
        """The ranks' folders are free with the ranks' end."""


def rank_lanes_tier(
    path: Path, identity: BlockIdentity, lanes: RankLanes, max_blocks: int, block_bytes: int,
    clock: Callable[[], float],
) -> DiskTier:  # fmt: skip
    """Begin to open the disk tier of a copy over several pods. `block_bytes`: of a block on one disk."""
    return DiskTier(RankLaneHome(path, identity, lanes), DiskIndex(max_blocks), lanes, block_bytes, clock)


def _open(folder: str, call: int) -> OpenLane:
    return OpenLane(call, folder)


def _remove(folder: str, digest: bytes, call: int) -> RemovePart:
    return RemovePart(call, folder, digest)
