"""This side's blocks as the links of a port read them: where they are, and when what was computed is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from stoker.engine.transfer.device_memory import Mark


class LocalBlocks(Protocol):
    """Blocks of one size. `mark` is called where they are computed, `read` by a link's thread."""

    count: int
    block_bytes: int

    def mark(self) -> Mark | None:
        """The place in the device's order behind all that was launched so far; None where nothing is asynchronous."""
        ...

    def read(self, blocks: Sequence[int], after: Mark | None) -> Iterator[np.ndarray]:
        """Each block's bytes, [block_bytes] uint8, in order. One is valid until the next is asked for."""
        ...


class MappableBlocks(LocalBlocks, Protocol):
    """Blocks one after the other in a device's memory."""

    address: int


class HostBlocks:
    """Blocks in main memory."""

    def __init__(self, blocks_BN: np.ndarray) -> None:
        """`blocks_BN`: [blocks, block_bytes] uint8."""
        self.blocks_BN = blocks_BN
        self.count, self.block_bytes = blocks_BN.shape

    def mark(self) -> None:
        return None

    def read(self, blocks: Sequence[int], after: Mark | None) -> Iterator[np.ndarray]:  # noqa: ARG002 - all is there
        return (self.blocks_BN[block] for block in blocks)


def local_blocks(blocks: np.ndarray | LocalBlocks) -> LocalBlocks:
    """An array of main memory as blocks; what are blocks already, as they are."""
    return HostBlocks(blocks) if isinstance(blocks, np.ndarray) else blocks
