"""Blocks and slots of one rank that are both in main memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.engine.transfer.cells import cell_sums, join_cells
from stoker.engine.transfer.intake import CopyAndSum, ReadySums, host_copy
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.part_plan import PartPlan


class HostStore:
    """A CPU rank's cache and its landing zone. As a `BlockStore` it is an engine of one rank."""

    def __init__(self, zone_SN: np.ndarray, cache_BN: np.ndarray, layout: BlockLayout) -> None:
        self.zone_SN, self.cache_BN, self.layout = zone_SN, cache_BN, layout
        self._copy = host_copy(zone_SN, cache_BN)

    def copier(self, plan: PartPlan) -> CopyAndSum:
        def copy_and_sum(slots: Sequence[int], blocks: Sequence[int]) -> ReadySums:
            return ReadySums(plan.received_sums([self.copy_cells(slots, blocks, plan.joins[0]).values()]))

        return copy_and_sum

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> ReadySums:
        return ReadySums(plan.sent_sums(blocks, [self.cell_sums(plan.sources(blocks), plan.cuts[0]).values()]))

    # One rank's part.

    def copy_cells(self, slots: Sequence[int], blocks: Sequence[int], cells: Grid) -> ReadySums:
        """Join each slot's cells into its cache block; return the sums of all cells that were stored."""
        if cells == ONE_CELL:
            return self._copy(slots, blocks)
        for slot, block in zip(slots, blocks, strict=True):
            join_cells(self.layout, self.zone_SN[slot], self.cache_BN[block], cells)
        return self.cell_sums(blocks, cells)

    def cell_sums(self, blocks: Sequence[int], cells: Grid) -> ReadySums:
        """The sums of the blocks' cells, one block after the other."""
        return ReadySums(one for block in blocks for one in cell_sums(self.layout, self.cache_BN[block], cells))
