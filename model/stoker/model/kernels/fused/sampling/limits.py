"""The search for the smallest logit that top-k, top-p and min-p leave in a row.

`bound` finds a logit that cannot lie above it, `candidates` takes the logits from there on, mostly a few hundred, `threshold` searches among them (among all where they are too many). B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.sampling.scan import PART, SPLIT, Scan
from stoker.model.kernels.fused.sampling.seat import MIN_P, TEMPERATURE, TOP_K, TOP_P, row_numbers, row_sharpness

CANDIDATES = 128
"""Most candidates of one split; rows with more are searched as a whole."""
SEARCH_BLOCK = 8192
"""Logits that the search for a threshold takes at once."""


def find_thresholds(scan: Scan) -> None:
    """Fill `thresholds` and `row_biggest`."""
    logits, splits = scan.logits, scan.splits
    num_rows, vocab_size = logits.shape
    candidates = torch.empty(num_rows, splits * CANDIDATES, dtype=torch.float32, device=logits.device)
    counts = torch.empty(num_rows, splits, dtype=torch.int32, device=logits.device)
    bounds = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    row_totals = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    all_splits = triton.next_power_of_2(splits)
    bound_kernel[(num_rows,)](
        scan.seats,
        scan.numbers,
        scan.biggest,
        scan.totals,
        scan.row_biggest,
        row_totals,
        scan.part_maxima,
        bounds,
        vocab_size,
        splits,
        SPLITS=all_splits,
        PARTS=triton.next_power_of_2(scan.part_maxima.shape[1]),
        SPLIT_PARTS=SPLIT // PART,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )
    candidates_kernel[(num_rows, splits)](
        logits,
        bounds,
        candidates,
        counts,
        logits.stride(0),
        vocab_size,
        splits,
        SPLIT=SPLIT,
        CANDIDATES=CANDIDATES,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )
    threshold_kernel[(num_rows,)](
        logits,
        scan.seats,
        scan.numbers,
        scan.row_biggest,
        row_totals,
        scan.thresholds,
        bounds,
        candidates,
        counts,
        logits.stride(0),
        vocab_size,
        splits,
        SPLITS=all_splits,
        CANDIDATES=CANDIDATES,
        BLOCK=SEARCH_BLOCK,
        enable_fp_fusion=True,
        num_warps=16,
        **overlap(),
    )


@triton.jit
def ordered(values):
    """int32 that are ordered as the float32 are."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """The logit that `ordered` turned into this key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def above(
    row, vocab_size, low, middle, high, base, sharpness, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many logits of a row have at least each of three keys, and (WEIGHTS) the sums of their weights."""
    count_low, count_middle, count_high = (tl.zeros([BLOCK], dtype=tl.int32),) * 3
    sum_low, sum_middle, sum_high = (tl.zeros([BLOCK], dtype=tl.float32),) * 3
    for begin in range(0, vocab_size, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        values = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        keys = ordered(values)
        is_low = (keys >= low) & (token < vocab_size)
        count_low += is_low.to(tl.int32)
        count_middle += (keys >= middle).to(tl.int32)
        count_high += (keys >= high).to(tl.int32)
        if WEIGHTS:
            weights = tl.exp((values - base) * sharpness)
            sum_low += tl.where(is_low, weights, 0.0)
            sum_middle += tl.where(keys >= middle, weights, 0.0)
            sum_high += tl.where(keys >= high, weights, 0.0)
    counts = tl.sum(count_low, 0), tl.sum(count_middle, 0), tl.sum(count_high, 0)
    return counts, (tl.sum(sum_low, 0), tl.sum(sum_middle, 0), tl.sum(sum_high, 0))


@triton.jit
def last_key(
    row, vocab_size, found, beyond, count_found, wanted, base, sharpness,
    WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key from which on there are still `wanted` logits, or (WEIGHTS) weights.

    `found` is known to have enough, `beyond` not; `count_found` may be too large at first. Each pass over the row quarters the range; the search ends when at most one logit is left in it.
    """
    count_beyond = tl.full([], 0, dtype=tl.int32)
    while (beyond - found > 1) & (count_found - count_beyond > 1):
        quarter = tl.maximum((beyond - found) >> 2, 1)
        low = found + quarter
        middle = tl.minimum(low + quarter, beyond)
        high = tl.minimum(middle + quarter, beyond)
        counts, sums = above(row, vocab_size, low, middle, high, base, sharpness, WEIGHTS, BLOCK)
        if WEIGHTS:
            enough_low, enough_middle, enough_high = sums[0] >= wanted, sums[1] >= wanted, sums[2] >= wanted
        else:
            enough_low, enough_middle, enough_high = counts[0] >= wanted, counts[1] >= wanted, counts[2] >= wanted
        if enough_high & (high < beyond):
            found, count_found = high, counts[2]
        elif enough_middle & (middle < beyond):
            found, count_found = middle, counts[1]
            beyond, count_beyond = high, tl.where(high < beyond, counts[2], count_beyond)
        elif enough_low:
            found, count_found = low, counts[0]
            beyond, count_beyond = middle, tl.where(middle < beyond, counts[1], count_beyond)
        else:
            beyond, count_beyond = low, counts[0]
        if (WEIGHTS == 0) & (count_found == wanted):  # exactly these are taken
            beyond = found + 1
    return found


@triton.jit
def is_drawn(own, seat, base):
    """A row with a temperature, a seat and finite logits: only such a one needs a threshold."""
    return (seat >= 0) & (tl.load(own + TEMPERATURE) != 0.0) & (tl.abs(base) < float("inf"))


@triton.jit
def row_limit(own, vocab_size):
    """Top-k, or the whole vocabulary."""
    limit = tl.load(own + TOP_K).to(tl.int32)
    return tl.where((limit > 0) & (limit < vocab_size), limit, vocab_size)


@triton.jit
def bound_kernel(
    seats, numbers, biggest, totals, row_biggest, row_totals, part_maxima, bounds, vocab_size, splits,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, SPLIT_PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: its largest logit, its sum, and a key that cannot be above the threshold's.

    At least k logits are as large as the k-th largest of the parts' maxima. And all logits of less weight than (1 - p) / V of the sum weigh less than 1 - p together: top-p alone needs none of them.
    After top-k they count: they are a part of the sum of which top-p takes its share.
    """
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    own = row_numbers(numbers, seat)
    sharpness = row_sharpness(numbers, seat)
    split = tl.arange(0, SPLITS)
    maxima = tl.load(biggest + row * splits + split, mask=split < splits, other=float("-inf"))
    sums = tl.load(totals + row * splits + split, mask=split < splits, other=0.0)
    base = tl.max(maxima, 0)
    scaled = tl.where(maxima > float("-inf"), sums * tl.exp((maxima - base) * sharpness), 0.0)
    total = tl.sum(scaled, 0).to(tl.float32)
    tl.store(row_biggest + row, base)
    tl.store(row_totals + row, total)
    limit, top_p = row_limit(own, vocab_size), tl.load(own + TOP_P)
    num_parts = splits * SPLIT_PARTS
    found = ordered(tl.full([], float("-inf"), dtype=tl.float32)).to(tl.int64)  # takes all
    if is_drawn(own, seat, base):
        if limit < vocab_size:
            if limit <= num_parts:
                end = ordered(base).to(tl.int64) + 1
                parts = part_maxima + row * num_parts
                found = last_key(parts, num_parts, found, end, num_parts, limit, base, sharpness, False, PARTS)
        elif top_p < 1.0:
            share = 0.5 * (1.0 - top_p) * total / vocab_size
            found = ordered(base + tl.div_rn(tl.log(share), sharpness)).to(tl.int64)
        else:
            found = tl.full([], 2147483647, dtype=tl.int64)  # nothing to search
    else:
        found = tl.full([], 2147483647, dtype=tl.int64)
    tl.store(bounds + row, found.to(tl.int32))


@triton.jit
def candidates_kernel(
    logits, bounds, candidates, counts, stride, vocab_size, splits,
    SPLIT: tl.constexpr, CANDIDATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split: its logits from the bound on, in their order, then -inf; and how many they are, which may be more than fit."""
    wait_for_last(OVERLAPS)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    taken = (ordered(values) >= tl.load(bounds + row)) & inside
    count = tl.sum(taken.to(tl.int32), 0)
    tl.store(counts + row * splits + split, count)
    target = candidates + (row * splits + split) * CANDIDATES
    if count > 0:
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(target + place, values, mask=taken & (place < CANDIDATES))
    slot = tl.arange(0, CANDIDATES)
    tl.store(target + slot, tl.full([CANDIDATES], float("-inf"), dtype=tl.float32), mask=slot >= count)


@triton.jit
def threshold_kernel(
    logits, seats, numbers, row_biggest, row_totals, thresholds, bounds, candidates, counts, stride, vocab_size, splits,
    SPLITS: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: the smallest logit that min-p, top-k and top-p leave, searched among the ordered keys."""
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    own = row_numbers(numbers, seat)
    sharpness = row_sharpness(numbers, seat)
    limit, top_p, min_p = row_limit(own, vocab_size), tl.load(own + TOP_P), tl.load(own + MIN_P)
    base, total = tl.load(row_biggest + row), tl.load(row_totals + row)
    split = tl.arange(0, SPLITS)
    split_counts = tl.load(counts + row * splits + split, mask=split < splits, other=0)
    start, length, count = logits + row * stride, vocab_size, vocab_size
    if tl.max(split_counts, 0) <= CANDIDATES:
        start = candidates + row * splits * CANDIDATES
        length = splits * CANDIDATES
        count = tl.sum(split_counts, 0)
    end = ordered(base).to(tl.int64) + 1
    found = tl.load(bounds + row).to(tl.int64)
    threshold = float("-inf")
    if is_drawn(own, seat, base) & ((limit < vocab_size) | (top_p < 1.0)):
        if limit < vocab_size:
            found = last_key(start, length, found, end, count, limit, base, sharpness, False, BLOCK)
            if top_p < 1.0:  # of equal logits at the limit only as many count as it leaves
                counts_there, weights = above(start, length, found, found + 1, found + 1, base, sharpness, True, BLOCK)
                of_ties = (limit - counts_there[1]) * tl.exp((logit_of(found) - base) * sharpness)
                total = tl.where(counts_there[0] > limit, weights[1] + of_ties, weights[0])
        if top_p < 1.0:
            found = last_key(start, length, found, end, count, top_p * total, base, sharpness, True, BLOCK)
        threshold = logit_of(found)
    lowest = tl.where(min_p > 0.0, base + tl.div_rn(tl.log(min_p), sharpness), float("-inf"))
    tl.store(thresholds + row, tl.maximum(threshold, lowest))
