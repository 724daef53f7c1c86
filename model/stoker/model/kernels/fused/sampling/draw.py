"""One draw per row from the sums of its splits: the split in which the cumulative sum passes the random number, then
the token.

Called last by `sampler`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.sampling.scan import SPLIT, Scan, largest
from stoker.model.kernels.fused.sampling.seat import TEMPERATURE, row_numbers, row_sharpness
from stoker.model.kernels.sampling import SampledTokens, SampleRows, SamplingTable


def draw(scan: Scan, rows: SampleRows, table: SamplingTable, sampled: SampledTokens, into_SL: Tensor | None) -> None:
    """Fill `sampled`, and each seat's place in `into_SL`."""
    num_rows, vocab_size = scan.logits.shape
    draw_kernel[(num_rows,)](
        scan.logits,
        scan.seats,
        scan.numbers,
        scan.biggest,
        scan.best_tokens,
        scan.totals,
        scan.thresholds,
        scan.logits.stride(0),
        vocab_size,
        scan.splits,
        table.keys,
        rows.positions,
        sampled.tokens,
        sampled.valid,
        into_SL,
        0 if into_SL is None else into_SL.stride(0),
        FILTERED=rows.filtered,
        WRITES=into_SL is not None,
        SPLITS=triton.next_power_of_2(scan.splits),
        SPLIT=SPLIT,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )


@triton.jit
def mixed(x):
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, choice, position):
    """float64 in [0, 1), multiples of 2^-32, from the three keys alone."""
    golden = tl.full([], 0x9E3779B97F4A7C15, dtype=tl.uint64)
    state = mixed(seed.to(tl.uint64) + golden)
    state = mixed(state ^ mixed(choice.to(tl.uint64) + 2 * golden))
    state = mixed(state ^ mixed(position.to(tl.uint64) + 3 * golden))
    return (state >> 32).to(tl.int64).to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit
def draw_kernel(
    logits, seats, numbers, biggest, best_tokens, totals, thresholds, stride, vocab_size, splits,
    keys, positions, tokens, valid, into, into_stride,
    FILTERED: tl.constexpr, WRITES: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: the split in which the cumulative sum passes the random number, then the token."""
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    sharpness = row_sharpness(numbers, seat)
    split = tl.arange(0, SPLITS)
    has_split = split < splits
    maxima = tl.load(biggest + row * splits + split, mask=has_split, other=float("-inf"))
    firsts = tl.load(best_tokens + row * splits + split, mask=has_split, other=2147483647)
    base, best_token = largest(maxima, firsts)
    scale = tl.exp((maxima - base) * sharpness)
    threshold = float("-inf")
    if FILTERED:
        threshold = tl.load(thresholds + row)
        scale = tl.where(threshold > float("-inf"), 1.0, scale)  # its sums are against the row's largest already
    sums = tl.load(totals + row * splits + split, mask=has_split, other=0.0)
    sums = tl.where(maxima > float("-inf"), sums * scale, 0.0)
    cumulative = tl.cumsum(sums, 0)
    place = tl.maximum(seat, 0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    random = uniform(tl.load(keys + place * 2), tl.load(keys + place * 2 + 1), position)
    target = random * tl.sum(sums, 0)
    passed = (cumulative <= target) & has_split
    chosen = tl.sum(passed.to(tl.int32), 0)
    last = tl.max(tl.where(sums > 0.0, split, 0), 0)  # rounding may put the target beyond the end
    target = tl.where(chosen > last, float("inf"), target)
    chosen = tl.minimum(chosen, last)
    before = tl.sum(tl.where(split < chosen, sums, 0.0), 0)
    token = chosen * SPLIT + tl.arange(0, SPLIT)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if FILTERED:
        inside = inside & (values >= threshold)
    weights = tl.where(inside, tl.exp((values - base) * sharpness), 0.0).to(tl.float64)
    has_weight = weights > 0.0
    passed_here = tl.cumsum(weights, 0) + before <= target
    first = tl.min(tl.where(has_weight & ~passed_here, token, 2147483647), 0)
    final = tl.max(tl.where(has_weight, token, 0), 0)
    drawn = tl.where(first == 2147483647, final, first)
    is_greedy = tl.load(row_numbers(numbers, seat) + TEMPERATURE) == 0.0
    result = tl.where(seat < 0, 0, tl.where(is_greedy, best_token, drawn)).to(tl.int64)
    tl.store(tokens + row, result)
    tl.store(valid + row, tl.abs(base) < float("inf"))
    if WRITES:
        tl.store(into + place * into_stride + position, result.to(into.dtype.element_ty), mask=seat >= 0)
