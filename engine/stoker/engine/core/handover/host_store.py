"""Blocks and slots that are both in main memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.intake import ReadySums, host_copy


class HostStore:
    """A CPU engine's cache and its landing zone."""

    def __init__(self, zone_SN: np.ndarray, cache_BN: np.ndarray) -> None:
        self.cache_BN = cache_BN
        self.copy_and_sum = host_copy(zone_SN, cache_BN)

    def sums(self, blocks: Sequence[int]) -> ReadySums:
        return ReadySums(int(raw_sums(self.cache_BN[block : block + 1])[0]) for block in blocks)
