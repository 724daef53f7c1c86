"""The slots of engines of any width in one process, as the tiers of files see them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal, cast

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_files import BlockFiles
from stoker.engine.core.disk.rank_file_work import RankFileWork
from stoker.engine.core.disk.rank_files import FileCall, rank_files
from stoker.engine.core.disk.slot_files import SlotFiles
from stoker.engine.ranks.block_calls import BlockReport, CallEnded, OpenFiles
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.part_plan import joined_sum
from stoker.engine.transfer.repack import repack
from testing.engine.faulty_files import FaultyFiles
from testing.engine.transfers import LAYOUT

Width = Literal["one", "tensor 2", "tensor 4", "pipeline 2", "tensor 2, pipeline 2"]


def _ranks(layers: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]) -> list[BlockLayout]:
    return [
        replace(LAYOUT, first_layer=first, end_layer=end, first_head=one, end_head=other)
        for first, end in layers
        for one, other in heads
    ]


WIDTHS: dict[Width, list[BlockLayout]] = {
    "one": [LAYOUT],
    "tensor 2": _ranks([(0, 2)], [(0, 1), (1, 2)]),
    "tensor 4": _ranks([(0, 2)], [(0, 1), (0, 1), (1, 2), (1, 2)]),  # more ranks than heads
    "pipeline 2": _ranks([(1, 2), (0, 1)], [(0, 2)]),
    "tensor 2, pipeline 2": _ranks([(1, 2), (0, 1)], [(0, 1), (1, 2)]),
}


class OneRank:
    """The slots of an engine of one rank."""

    def __init__(self, num_slots: int) -> None:
        self._slots = np.zeros((num_slots, LAYOUT.block_bytes), dtype=np.uint8)

    def carrier(self, identity: BlockIdentity) -> Callable[[], BlockFiles]:
        return partial(SlotFiles, identity, self._slots)

    def fill(self, slot: int, block_N: np.ndarray) -> int:
        """Put a block into a slot. Returns its raw sum."""
        self._slots[slot] = block_N
        return int(raw_sums(block_N[None])[0])

    def block(self, slot: int) -> np.ndarray:
        block_N: np.ndarray = self._slots[slot]
        return block_N

    def clear(self, slot: int) -> None:
        self._slots[slot] = 0


class RanksBeside:
    """The slots of several ranks, and the leader's calls to them; a lost rank does nothing any more."""

    def __init__(self, layouts: Sequence[BlockLayout], num_slots: int, *, apart: bool = False) -> None:
        """`apart`: each rank sees a file system of its own (`files_of`)."""
        self.layouts, self.files = list(layouts), FaultyFiles()
        self._files = [FaultyFiles() if apart else self.files for _ in layouts]
        self.slots = [np.zeros((num_slots, one.block_bytes), dtype=np.uint8) for one in layouts]
        self.sums: list[dict[int, int]] = [{} for _ in layouts]
        self.lost: set[int] = set()
        self._works: dict[int, RankFileWork] = {}
        self._reports: queue.SimpleQueue[BlockReport] = queue.SimpleQueue()
        self._open: dict[int, Callable[[CallEnded], None]] = {}
        self._numbers = count(1)

    def carrier(self, identity: BlockIdentity) -> Callable[[], BlockFiles]:
        return rank_files(cast(RankCalls, self), self.layouts, identity)

    def fill(self, slot: int, block_N: np.ndarray) -> int:
        """Put a block into the slots of all ranks. Returns its raw sum."""
        for layout, slots, sums in zip(self.layouts, self.slots, self.sums, strict=True):
            repack([(LAYOUT, {0: block_N})], layout, {0: slots[slot]})
            sums[slot] = int(raw_sums(slots[slot][None])[0])
        return joined_sum([sums[slot] for sums in self.sums])

    def block(self, slot: int) -> np.ndarray:
        """The block that the ranks' slots are together; ranks with the same heads hold the same."""
        parts = {part_of(layout): (layout, slots[slot]) for layout, slots in zip(self.layouts, self.slots, strict=True)}
        assert all(
            (slots[slot] == parts[part_of(layout)][1]).all()
            for layout, slots in zip(self.layouts, self.slots, strict=True)
        )
        block_N = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
        repack([(layout, {0: part_N}) for layout, part_N in parts.values()], LAYOUT, {0: block_N})
        return block_N

    def clear(self, slot: int) -> None:
        for slots in self.slots:
            slots[slot] = 0

    # As the leader's calls.

    @property
    def num_ranks(self) -> int:
        return len(self.layouts)

    def call(self, rank: int, call: OpenFiles) -> None:
        self._works[rank] = RankFileWork(
            call, self.layouts[rank], self.slots[rank], self.sums[rank], self._reports.put, self._files[rank]
        )

    def files_of(self, rank: int) -> FaultyFiles:
        """The file system that a rank sees."""
        return self._files[rank]

    def close(self) -> None:
        """End the ranks, whose folders come free."""
        for work in self._works.values():
            work.close()

    def begin(self, rank: int, call: FileCall, on_end: Callable[[CallEnded], None]) -> None:
        number = next(self._numbers)
        self._open[number] = on_end
        if rank not in self.lost:
            self._works[rank].do(call(number))

    def read_reports(self) -> None:
        while not self._reports.empty():
            report = self._reports.get()
            assert isinstance(report, CallEnded)
            self._open.pop(report.call)(report)

    def settle(self, condition: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < until_s:
            self.read_reports()
            time.sleep(0.001)
