"""Small blocks with contents and sums, and a disk tier over them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.block_folder import Files
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.lane_home import disk_tier
from stoker.engine.core.disk.slot_files import SlotFiles
from stoker.engine.core.host_index import HostEntry
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.checksum import content_seed, raw_sums, seeded
from stoker.engine.transfer.fingerprint import content_digest
from testing.engine.transfers import FINGERPRINT, LAYOUT, random_blocks

IDENTITY = BlockIdentity(FINGERPRINT, "tenant", LAYOUT)
WHOLE = (part_of(LAYOUT),)
WAIT_S = 120.0


def content_of(number: int, identity: BlockIdentity = IDENTITY) -> BlockContent:
    tokens = tuple(number * LAYOUT.block_size + place for place in range(LAYOUT.block_size))
    return BlockContent(content_digest(identity.root, tokens), identity.root, tokens)


def block_of(number: int) -> np.ndarray:
    """[block_bytes] uint8."""
    block_N: np.ndarray = random_blocks(1, seed=number)[0]
    return block_N


def sum_of(number: int, identity: BlockIdentity = IDENTITY) -> int:
    raw = int(raw_sums(block_of(number)[None])[0])
    return seeded(raw, content_seed(identity.root, 0, content_of(number, identity).digest))


class DiskBench:
    """A disk tier with as many slots of a host tier as there are numbers."""

    def __init__(
        self, path: Path, max_blocks: int = 100, *, num_slots: int = 40, files: Files | None = None,
        clock: Callable[[], float] = lambda: 0.0, identity: BlockIdentity = IDENTITY,
    ) -> None:  # fmt: skip
        self.slots = np.zeros((num_slots, LAYOUT.block_bytes), dtype=np.uint8)
        self.identity = identity
        self.tier = disk_tier(path, identity, max_blocks, SlotFiles(identity, self.slots), clock, files)
        self.poll_until(lambda: self.tier.state != "opening")

    def poll_until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            self.tier.poll()
            assert time.monotonic() < until_s
            time.sleep(0.001)

    def entry(self, number: int) -> HostEntry:
        """A block in its slot of the host tier."""
        self.slots[number] = block_of(number)
        return HostEntry(content_of(number, self.identity), number, sum_of(number, self.identity))

    def write(self, number: int) -> bool:
        """Write a block, and wait for the end. Whether it was begun."""
        if not self.tier.room() or not self.tier.write(self.entry(number)):
            return False
        self.poll_until(lambda: not self.tier.busy)
        return True

    def read(self, number: int) -> int | None:
        """Read a block into its slot; its sum, or None."""
        self.slots[number] = 0
        entry = HostEntry(content_of(number, self.identity), number)
        self.tier.read(entry)
        ends: list[ReadEnd] = []
        until_s = time.monotonic() + WAIT_S
        while not ends:
            ends = self.tier.poll()[1]
            assert time.monotonic() < until_s
        return ends[0].sum

    def holds(self, number: int) -> bool:
        return self.tier.readable and self.tier.holds(content_of(number, self.identity))
