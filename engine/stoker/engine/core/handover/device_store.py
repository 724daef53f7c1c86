"""Blocks of a cache and slots of a landing zone that are both in a GPU's memory.

Copies into the cache run in order with the computation: whatever is launched later finds them done, and a block that is
given to another request meanwhile is overwritten by that request and never by the copy. Sums of computed blocks run on
a stream of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.engine.transfer.checksum_kernel import copy_and_sum, sums, torch_copy_and_sum, torch_sums
from stoker.engine.transfer.intake import CopyAndSum
from stoker.engine.transfer.layout import ONE_CELL, Grid
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


class DeviceStore:
    """A GPU rank's cache and its landing zone. As a `BlockStore` it is an engine of one rank."""

    @torch.inference_mode()
    def __init__(self, zone_SN: Tensor, cache_BN: Tensor, *, fused: bool) -> None:
        """Both uint8 on one GPU. `fused`: copy and sum by the Triton kernel, which is compiled here."""
        self.zone_SN, self.cache_BN = zone_SN, cache_BN
        self._copy = copy_and_sum if fused else torch_copy_and_sum
        self._sums = sums if fused else torch_sums
        self._stream = torch.cuda.Stream(cache_BN.device)  # type: ignore[no-untyped-call]
        rows = StagedRows([[0], [0]], cache_BN.device)
        first_B, second_B = rows.rows
        self._copy(cache_BN, first_B, cache_BN, second_B, rows.sums_B)  # compiles the kernels
        self.cell_sums([0], ONE_CELL).values()

    def copier(self, plan: PartPlan) -> CopyAndSum:
        return lambda slots, blocks: self.copy_cells(slots, blocks, plan.joins[0])

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> StreamSums:
        return self.cell_sums([run for runs in blocks for run in runs], plan.cuts[0])  # a run is a block

    @torch.inference_mode()
    def copy_cells(self, slots: Sequence[int], blocks: Sequence[int], cells: Grid) -> StreamSums:
        """Begin to copy slots into cache blocks, behind what this thread has launched before."""
        assert cells == ONE_CELL, "the ports of a GPU refuse other widths"
        rows = StagedRows([slots, blocks], self.cache_BN.device)
        slots_B, blocks_B = rows.rows
        self._copy(self.zone_SN, slots_B, self.cache_BN, blocks_B, rows.sums_B)
        return StreamSums(rows.read_back(), torch.cuda.current_stream(self.cache_BN.device))

    @torch.inference_mode()
    def cell_sums(self, blocks: Sequence[int], cells: Grid) -> StreamSums:
        """Begin to sum cache blocks, beside what is computed: the steps that computed them have ended."""
        assert cells == ONE_CELL, "the ports of a GPU refuse other widths"
        with torch.cuda.stream(self._stream):
            rows = StagedRows([blocks], self.cache_BN.device)
            self._sums(self.cache_BN, rows.rows[0], rows.sums_B)
            return StreamSums(rows.read_back(), self._stream)
