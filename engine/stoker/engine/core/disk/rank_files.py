"""Blocks between the slots of an engine of several ranks and files: every rank writes and reads its own part.

A block is written when all ranks have written theirs; of ranks that hold the same heads the first one writes. It is
read when all have what they hold. Called in the core's thread; the ranks' ends are taken up by `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import BlockFolder
from stoker.engine.core.disk.file_failure import FileFailed, worst
from stoker.engine.core.host_index import HostEntry
from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.block_calls import CallEnded, OpenFiles, OpenLane, ReadPart, RemovePart, WritePart
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.transfer.block_part import BlockPart, Parts, part_of
from stoker.engine.transfer.checksum import content_seed, seeded
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.part_plan import joined_sum

Result = TypeVar("Result")
FileCall = Callable[[int], WritePart | ReadPart | OpenLane | RemovePart]
"""Makes a call from its number."""


def rank_files(calls: RankCalls, layouts: Sequence[BlockLayout], identity: BlockIdentity) -> Callable[[], RankFiles]:
    """Tell all ranks what the files are. Returns what makes a carrier. `layouts`: by rank."""
    for rank in range(calls.num_ranks):
        calls.call(rank, OpenFiles(identity.fingerprint, identity.salt, identity.layout))
    return partial(RankFiles, calls, layouts, identity.root)


def wait_for_report(calls: RankCalls, pending: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until the ranks have ended one of these, and no longer than so many seconds. Raises ExecutorLost."""
    calls.settle(lambda: any(one.done() for one in pending), timeout_s)


class JointCall(Generic[Result]):
    """A call of several ranks. Its future ends with the last one."""

    def __init__(self, ranks: Sequence[int], result: Callable[[Sequence[CallEnded]], Result]) -> None:
        """`result`: from the ends, by rank."""
        self.future: Future[Result] = Future()
        self.future.set_running_or_notify_cancel()
        self._ends: dict[int, CallEnded | None] = dict.fromkeys(ranks)
        self._result = result

    def note(self, rank: int, end: CallEnded) -> None:
        self._ends[rank] = end
        ends = [end for end in self._ends.values() if end is not None]
        if len(ends) < len(self._ends):
            return
        failure = worst(FileFailed(end.cause, f"rank {rank}: {end.error}") for rank, end in self._failed())
        if failure is not None:
            self.future.set_exception(failure)
        else:
            self.future.set_result(self._result(ends))

    def _failed(self) -> list[tuple[int, CallEnded]]:
        return [(rank, end) for rank, end in self._ends.items() if end is not None and end.error]


class RankFiles:
    """The parts of blocks, a file each."""

    def __init__(self, calls: RankCalls, layouts: Sequence[BlockLayout], root: bytes) -> None:
        self.calls, self.layouts, self.root = calls, layouts, root
        owners: dict[BlockPart, int] = {}
        for rank, layout in enumerate(layouts):
            owners.setdefault(part_of(layout), rank)
        self.parts: Parts = tuple(owners)
        self._writers: Sequence[int] = tuple(owners.values())
        self._ranks = range(len(layouts))
        self._open: set[Future[None] | Future[int]] = set()

    def write(self, folder: BlockFolder, entry: HostEntry) -> Future[None]:
        joint = JointCall[None](self._writers, lambda _: None)
        self._begin(joint, {rank: partial(_write, folder, entry) for rank in self._writers})
        return joint.future

    def read(self, folder: BlockFolder, entry: HostEntry, parts: Parts) -> Future[int]:
        seed = content_seed(self.root, 0, entry.content.digest)
        joint = JointCall[int](self._ranks, lambda ends: seeded(joined_sum([end.sums[0] for end in ends]), seed))
        self._begin(joint, {rank: partial(_read, folder, entry, self.read_by(rank, parts)) for rank in self._ranks})
        return joint.future

    def read_by(self, rank: int, parts: Parts) -> Parts:  # noqa: ARG002 - every rank sees all files
        """Those of a block's parts that a rank may read."""
        return parts

    def poll(self) -> None:
        self.calls.read_reports()

    def close(self, timeout_s: float) -> None:
        """The ranks' threads end with the ranks."""
        with suppress(ExecutorLost):  # the engine ends in any case
            self.calls.settle(lambda: not self._open, timeout_s)

    def _begin(self, joint: JointCall[None] | JointCall[int], calls: Mapping[int, FileCall]) -> None:
        self._open.add(joint.future)
        joint.future.add_done_callback(self._open.discard)
        for rank, call in calls.items():
            self.calls.begin(rank, call, partial(joint.note, rank))


def _write(folder: BlockFolder, entry: HostEntry, call: int) -> WritePart:
    content = entry.content
    return WritePart(call, str(folder.path), entry.slot, content.digest, content.parent, content.tokens)


def _read(folder: BlockFolder, entry: HostEntry, parts: Parts, call: int) -> ReadPart:
    content = entry.content
    return ReadPart(call, str(folder.path), entry.slot, content.digest, content.parent, content.tokens, parts)
