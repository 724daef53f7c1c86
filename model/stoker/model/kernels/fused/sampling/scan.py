"""One reading of the logits: each split's largest one and its sum of weights.

B rows, N splits of a row, P parts of a row.

Called by `sampler`, after `adjustment` and before `limits` and `draw`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.sampling.seat import row_sharpness
from stoker.model.kernels.sampling import SampleRows, SamplingTable

SPLIT = 4096
"""Logits of one split."""
PART = 128
"""Logits whose maximum is kept for `bracket.bound_kernel`."""


class Scan(NamedTuple):
    """Results that the kernels of one call hand on. N splits of a row, P parts of a row."""

    logits: Tensor
    seats: Tensor
    numbers: Tensor
    biggest: Tensor
    """float32 [B, N]: each split's largest logit."""
    best_tokens: Tensor
    """int32 [B, N]: where it stands."""
    totals: Tensor
    """float64 [B, N]: the split's sum of weights, against its largest logit; after `apply_limits` against the row's,
    and only of what the limit leaves, where the row has one.
    """
    thresholds: Tensor
    """float32 [B]; -inf: none."""
    row_biggest: Tensor
    """float32 [B]"""
    part_maxima: Tensor
    """float32 [B, P]; empty where no row has a threshold, as the two above are."""
    splits: int
    filtered: bool


def make_scan(logits: Tensor, rows: SampleRows, table: SamplingTable) -> Scan:
    num_rows, splits = logits.shape[0], triton.cdiv(logits.shape[1], SPLIT)
    num_filtered = num_rows if rows.filtered else 0

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    return Scan(
        logits,
        rows.seats,
        table.numbers,
        buffer(num_rows, splits),
        buffer(num_rows, splits, dtype=torch.int32),
        buffer(num_rows, splits, dtype=torch.float64),
        buffer(num_filtered),
        buffer(num_filtered),
        buffer(num_filtered, splits * (SPLIT // PART)),
        splits,
        rows.filtered,
    )


def sum_splits(scan: Scan) -> None:
    """Maxima and sums of all splits."""
    scan_kernel[(scan.logits.shape[0], scan.splits)](
        scan.logits,
        scan.seats,
        scan.numbers,
        scan.biggest,
        scan.best_tokens,
        scan.totals,
        scan.part_maxima,
        scan.logits.stride(0),
        scan.logits.shape[1],
        scan.splits,
        KEEPS_PARTS=scan.filtered,
        SPLIT=SPLIT,
        PART=PART,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )


@triton.jit
def largest(values, tokens):
    """The largest logit and its token, the first of equal ones."""
    base = tl.max(values, 0)
    return base, tl.min(tl.where(values == base, tokens, 2147483647), 0)


@triton.jit
def scan_kernel(
    logits, seats, numbers, biggest, best_tokens, totals, part_maxima, stride, vocab_size, splits,
    KEEPS_PARTS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split: its largest logit and token, and the sum of exp((logit - largest) / temperature)."""
    wait_for_last(OVERLAPS)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)  # a nan makes the row as invalid as an infinity does
    sharpness = row_sharpness(numbers, tl.load(seats + row))
    base, best_token = largest(values, token)
    tl.store(biggest + row * splits + split, base)
    tl.store(best_tokens + row * splits + split, best_token)
    if KEEPS_PARTS:
        parts: tl.constexpr = SPLIT // PART
        place = (row * splits + split) * parts + tl.arange(0, parts)
        tl.store(part_maxima + place, tl.max(tl.reshape(values, [parts, PART]), 1))
    weights = tl.where(inside & (values > float("-inf")), tl.exp((values - base) * sharpness), 0.0)
    tl.store(totals + row * splits + split, tl.sum(weights, 0).to(tl.float64))
