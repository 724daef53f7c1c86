"""The limit that top-k, top-p and min-p set in each row: its smallest logit, and its splits' sums from there on.

B rows, N splits of a row.

Measured on an H200 (float32, V = 128,256, B = 1 / 32 / 256, with scan and draw, which alone take 8 / 15 / 49 us): top-p
0.9 of peaked rows 33 / 53 / 148 us, of flat ones, of which it leaves tens of thousands of tokens, 46 / 81 / 392 us;
top-k 50 32 / 50 / 108 us.

Called by `sampler` between `scan` and `draw`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap
from stoker.model.kernels.fused.sampling.bracket import bound_kernel, narrow_kernel
from stoker.model.kernels.fused.sampling.scan import PART, SPLIT, Scan
from stoker.model.kernels.fused.sampling.selection import list_kernel, select_kernel

PASSES = 3
"""Most passes that make a row's range narrower, by seven times each.

Two are enough for most rows, the last has nothing to do then.
"""
PIVOTS = 8
"""Logits whose sums one pass makes."""
FEW = 256
"""Logits of each split that may be listed without another pass."""
CAPACITY = 512
"""Most logits of one split that are listed; the row itself is searched where some split has more."""
FEW_PARTS = 256
"""Most parts from which the row's own program lists what they have."""
SEARCH_PIVOTS = 16
"""Logits that the search tries at once."""
BOUND_ROUNDS = 4
"""The first range need not be exact."""
TILE = 1024
"""Logits that are listed or searched at once."""
BLOCK = 512
"""Logits that a pass takes at once."""
MANY_PROGRAMS = 2048
"""With more programs than this, each takes several splits."""


def apply_limits(scan: Scan) -> None:
    """Fill `thresholds` and `row_biggest`; the `totals` of rows with a limit become those of what it leaves."""
    logits, splits = scan.logits, scan.splits
    num_rows, vocab_size = logits.shape
    all_splits = triton.next_power_of_2(splits)
    each = 4 if num_rows * splits > MANY_PROGRAMS else 1

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    wanted, brackets = buffer(num_rows), buffer(PASSES + 1, num_rows, 4)
    hit_parts, hit_counts = buffer(num_rows, FEW_PARTS, dtype=torch.int32), buffer(num_rows, dtype=torch.int32)
    pivots, measures = buffer(PASSES, num_rows, PIVOTS), buffer(PASSES, num_rows, splits, PIVOTS)
    listed = buffer(num_rows, splits, CAPACITY)
    listed_splits = buffer(num_rows, splits, CAPACITY, dtype=torch.int16)
    counts, weights_above = buffer(num_rows, splits, dtype=torch.int32), buffer(num_rows, splits)
    row, passed = (scan.seats, scan.numbers), (brackets, pivots, measures, wanted)
    sizes = (logits.stride(0), num_rows, vocab_size, splits)
    common: dict[str, Any] = {"SPLITS": all_splits, "enable_fp_fusion": True, **overlap()}
    bound_kernel[(num_rows,)](
        *row, scan.biggest, scan.totals, scan.row_biggest, scan.part_maxima, brackets, wanted, hit_parts, hit_counts,
        vocab_size, splits,
        SPLIT_PARTS=SPLIT // PART, FEW_PARTS=FEW_PARTS, PIVOTS=SEARCH_PIVOTS, ROUNDS=BOUND_ROUNDS, num_warps=8,
        **common,
    )  # fmt: skip
    grid = (num_rows, triton.cdiv(splits, each))
    for index in range(PASSES):
        narrow_kernel[grid](
            logits, *row, scan.row_biggest, hit_counts, *passed, *sizes,
            PASS=index, SPLIT=SPLIT, EACH=each, PIVOTS=PIVOTS, FEW=FEW, BLOCK=BLOCK, num_warps=4, **common,
        )  # fmt: skip
    list_kernel[grid](
        logits, *row, scan.biggest, scan.row_biggest, hit_counts, scan.part_maxima, *passed, listed, counts,
        weights_above, *sizes,
        PASS=PASSES, SPLIT=SPLIT, PART=PART, CAPACITY=CAPACITY, TILE=TILE, EACH=each, PIVOTS=PIVOTS, FEW=FEW,
        num_warps=4, **common,
    )  # fmt: skip
    select_kernel[(num_rows,)](
        logits, *row, scan.row_biggest, hit_parts, hit_counts, brackets, wanted, listed, listed_splits, counts,
        weights_above, scan.thresholds, scan.totals, *sizes,
        PASS=PASSES, SPLIT=SPLIT, PART=PART, CAPACITY=CAPACITY, FEW_PARTS=FEW_PARTS, COLUMNS=max(1, TILE // all_splits),
        TILE=TILE, PIVOTS=SEARCH_PIVOTS, num_warps=8, **common,
    )  # fmt: skip
