"""Blocks of a cache and slots of a landing zone that are both in a GPU's memory.

Copies into the cache run in order with the computation: whatever is launched later finds them done, and a block that is
given to another request meanwhile is overwritten by that request and never by the copy. Sums of computed blocks run on
a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.engine.transfer.cell_kernel import join_cells, shape_of, sum_cells, torch_join_cells, torch_sum_cells
from stoker.engine.transfer.checksum_kernel import copy_and_sum, sums, torch_copy_and_sum, torch_sums
from stoker.engine.transfer.intake import CopyAndSum, Sums
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.staged_rows import StagedRows


class StreamSums:
    """Sums that a stream computes."""

    def __init__(self, sums_B: Tensor, stream: torch.cuda.Stream) -> None:
        """`sums_B`: int64 in pinned memory, being filled by what the stream has been given."""
        self._sums_B = sums_B
        self._end: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end.record(stream)

    def done(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def values(self) -> Sequence[int]:
        self._end.synchronize()
        found: list[int] = self._sums_B.numpy().view(np.uint64).tolist()
        return found


class PlannedSums:
    """Sums of blocks from those of their cells."""

    def __init__(self, cells: Sums, of_blocks: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._cells, self._of_blocks = cells, of_blocks
        self._found: Sequence[int] | None = None

    def done(self) -> bool:
        return self._cells.done()

    def values(self) -> Sequence[int]:
        """Computed once, though each piece of a push asks for them."""
        if self._found is None:
            self._found = self._of_blocks(self._cells.values())
        return self._found


class DeviceStore:
    """A GPU rank's cache and its landing zone. As a `BlockStore` it is an engine of one rank."""

    @torch.inference_mode()
    def __init__(self, zone_SN: Tensor, cache_BN: Tensor, layout: BlockLayout, *, fused: bool) -> None:
        """Both uint8 on one GPU. `fused`: copy and sum by Triton kernels, which are compiled here."""
        self.zone_SN, self.cache_BN, self.layout = zone_SN, cache_BN, layout
        self._copy = copy_and_sum if fused else torch_copy_and_sum
        self._sums = sums if fused else torch_sums
        self._join = join_cells if fused else torch_join_cells
        self._sum_cells = sum_cells if fused else torch_sum_cells
        self._stream = torch.cuda.Stream(cache_BN.device)  # type: ignore[no-untyped-call]
        self._compile()

    def _compile(self) -> None:
        """Launch each kernel once: later launches stand between steps."""
        rows = StagedRows([[0], [0]], self.cache_BN.device)
        arguments = self.cache_BN, rows.rows[0], self.cache_BN, rows.rows[1], rows.sums_S
        whole = shape_of(self.layout, ONE_CELL)
        self._copy(*arguments)
        self._join(*arguments, whole)
        self._sum_cells(self.cache_BN, rows.rows[0], rows.sums_S, whole)
        self.cell_sums([0], ONE_CELL).values()

    def copier(self, plan: PartPlan) -> CopyAndSum:
        if not plan.repacks:
            return lambda slots, blocks: self.copy_cells(slots, blocks, ONE_CELL)
        return lambda slots, blocks: PlannedSums(
            self.copy_cells(slots, blocks, plan.joins[0]), lambda values: plan.received_sums([values])
        )

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> Sums:
        if not plan.repacks:
            return self.cell_sums([run for runs in blocks for run in runs], ONE_CELL)  # a run is a block
        cells = self.cell_sums(plan.sources(blocks), plan.cuts[0])
        return PlannedSums(cells, lambda values: plan.sent_sums(blocks, [values]))

    @torch.inference_mode()
    def copy_cells(self, slots: Sequence[int], blocks: Sequence[int], cells: Grid) -> StreamSums:
        """Begin to join slots' cells into cache blocks, behind what this thread has launched before. The sums are those
        of all cells, one block after the other."""
        rows = StagedRows([slots, blocks], self.cache_BN.device, cells.cells)
        arguments = self.zone_SN, rows.rows[0], self.cache_BN, rows.rows[1], rows.sums_S
        if cells == ONE_CELL:
            self._copy(*arguments)
        else:
            self._join(*arguments, shape_of(self.layout, cells))
        return StreamSums(rows.read_back(), torch.cuda.current_stream(self.cache_BN.device))

    @torch.inference_mode()
    def cell_sums(self, blocks: Sequence[int], cells: Grid) -> StreamSums:
        """Begin to sum the cells of cache blocks, beside what is computed: the steps that computed them have ended."""
        with torch.cuda.stream(self._stream):
            rows = StagedRows([blocks], self.cache_BN.device, cells.cells)
            if cells == ONE_CELL:
                self._sums(self.cache_BN, rows.rows[0], rows.sums_S)
            else:
                self._sum_cells(self.cache_BN, rows.rows[0], rows.sums_S, shape_of(self.layout, cells))
            return StreamSums(rows.read_back(), self._stream)
