"""Checksums of blocks on a device: a Triton kernel, and the same in plain torch.

The kernel copies blocks while it adds them up: memory is read once. What it sums is what it stores.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.engine.transfer.checksum import COLUMNS, column_keys, num_rows, row_keys

TILE = 4
"""Rows of one turn of the kernel: 16 KiB."""
RUN = 16
"""Rows that one program adds up: 64 KiB, so that a block of 9 MiB gives 144 programs."""


def copy_and_sum(
    source_SN: Tensor, sources_B: Tensor, target_TN: Tensor, targets_B: Tensor, sums_B: Tensor
) -> None:  # fmt: skip
    """Copy rows of bytes, and add the raw sums of what was stored to `sums_B`. The bits are those of `raw_sums`.

    Rows are contiguous, of equal length, a multiple of 4; `sources_B`, `targets_B` and `sums_B` are int64 on the same
    device.
    """
    _launch(source_SN, sources_B, target_TN, targets_B, sums_B, copies=True)


def sums(source_SN: Tensor, sources_B: Tensor, sums_B: Tensor) -> None:
    """Add the raw sums of rows of bytes to `sums_B`; nothing is copied."""
    _launch(source_SN, sources_B, source_SN, sources_B, sums_B, copies=False)


def torch_sums(source_SN: Tensor, sources_B: Tensor, sums_B: Tensor) -> None:
    """`sums` in plain torch; the slow twin, and the way without Triton."""
    words_BW = source_SN.index_select(0, sources_B).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rows = num_rows(words_BW.shape[1])
    padded = torch.nn.functional.pad(words_BW, (0, rows * COLUMNS - words_BW.shape[1]))
    columns_C, rows_R = keys(rows, source_SN.device)
    sums_B += ((padded.view(-1, rows, COLUMNS) * columns_C).sum(2) * rows_R).sum(1)


def torch_copy_and_sum(
    source_SN: Tensor, sources_B: Tensor, target_TN: Tensor, targets_B: Tensor, sums_B: Tensor
) -> None:  # fmt: skip
    """`copy_and_sum` in plain torch."""
    target_TN.index_copy_(0, targets_B, source_SN.index_select(0, sources_B))
    torch_sums(target_TN, targets_B, sums_B)


@cache
def keys(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables of columns [COLUMNS] and rows [rows], as int64 with the same bits."""
    tables = column_keys(), row_keys(rows)
    columns_C, rows_R = (torch.from_numpy(table.view(np.int64).copy()).to(device) for table in tables)
    return columns_C, rows_R


def _launch(
    source_SN: Tensor, sources_B: Tensor, target_TN: Tensor, targets_B: Tensor, sums_B: Tensor, *, copies: bool
) -> None:  # fmt: skip
    words = source_SN.shape[1] // 4
    if source_SN.shape[1] % 4 or target_TN.shape[1] != source_SN.shape[1]:
        raise ValueError(f"rows must have equal multiples of 4 bytes, got {source_SN.shape[1]}, {target_TN.shape[1]}")
    rows, blocks = num_rows(words), len(sources_B)
    if blocks:
        columns_C, rows_R = keys(rows, source_SN.device)
        sum_kernel[(blocks, triton.cdiv(rows, RUN))](
            source_SN.view(torch.int32), sources_B, target_TN.view(torch.int32), targets_B, columns_C, rows_R, sums_B,
            words, rows, COPIES=copies, COLUMNS=COLUMNS, TILE=TILE, RUN=RUN, num_warps=8,
        )  # fmt: skip


@triton.jit
def sum_kernel(
    source, sources, target, targets, columns, row_keys, sums, words, rows,
    COPIES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    block, program = tl.program_id(0), tl.program_id(1)
    begin = tl.load(sources + block) * words
    end = tl.load(targets + block) * words
    column = tl.arange(0, COLUMNS)
    column_key = tl.load(columns + column)
    total = tl.zeros([TILE], dtype=tl.int64)
    for turn in range(0, RUN, TILE):
        row = program * RUN + turn + tl.arange(0, TILE)
        place = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        inside = place < words
        value = tl.load(source + begin + place, mask=inside, other=0)
        if COPIES:
            tl.store(target + end + place, value, mask=inside)
        wide = value.to(tl.int64) & 0xFFFFFFFF
        row_key = tl.load(row_keys + row, mask=row < rows, other=0)
        total += tl.sum(wide * column_key[None, :], 1) * row_key
    tl.atomic_add(sums + block, tl.sum(total, 0), sem="relaxed")  # modulo 2^64, so in any order
