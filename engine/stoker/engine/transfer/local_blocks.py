"""This side's blocks as the links of a port read them. What is read was computed by steps that have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np


class LocalBlocks(Protocol):
    """Blocks of one size. `read` is called by a link's thread."""

    count: int
    block_bytes: int

    def read(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
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

    def read(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        return (self.blocks_BN[block] for block in blocks)


def local_blocks(blocks: np.ndarray | LocalBlocks) -> LocalBlocks:
    """An array of main memory as blocks; what are blocks already, as they are."""
    return HostBlocks(blocks) if isinstance(blocks, np.ndarray) else blocks
