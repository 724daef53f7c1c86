"""The range of logits in which a row's limit lies, made narrower until few logits are in it.

The first range comes from the parts' largest logits alone: of a peaked row, or with a small top-k, few parts reach into
it, and only those are read again. Another is cut into equal ranges by every pass, whose sums say in which the limit
lies; each pass works that out from the sums of the last, and does nothing where few logits of each split are expected
in the range. A row with both top-k and top-p is not made narrower, because top-p's limit lies elsewhere. B rows, N
splits of a row, P parts of a row.

Called by `limits` and `selection`. Changes only its own buffers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.model.kernels.fused.launch import wait_for_last
from stoker.model.kernels.fused.sampling.search import element, last_key, logit_of, ordered
from stoker.model.kernels.fused.sampling.seat import MIN_P, TEMPERATURE, TOP_K, TOP_P, row_numbers, row_sharpness

NO_WEIGHT = tl.constexpr(110.0)
"""exp of its negative is 0 in float32: nothing so far below the largest logit is ever drawn."""


UNKNOWN = tl.constexpr(1e9)
"""Largest number that counts as few."""


@triton.jit
def is_drawn(own, seat, base):
    """Whether a row has a temperature, a seat and finite logits: only such a row needs a threshold."""
    return (seat >= 0) & (tl.load(own + TEMPERATURE) != 0.0) & (tl.abs(base) < float("inf"))


@triton.jit
def row_limit(own, vocab_size):
    """Return top-k, or the whole vocabulary."""
    limit = tl.load(own + TOP_K).to(tl.int32)
    return tl.where((limit > 0) & (limit < vocab_size), limit, vocab_size)


@triton.jit
def lowest_logit(own, base, sharpness):
    """Return the smallest logit that min-p leaves."""
    min_p = tl.load(own + MIN_P)
    return tl.where(min_p > 0.0, base + tl.div_rn(tl.log(min_p), sharpness), float("-inf"))


@triton.jit
def store_bracket(brackets, place, low, high, above, expected):
    tl.store(brackets + place * 4, low)
    tl.store(brackets + place * 4 + 1, high)
    tl.store(brackets + place * 4 + 2, above)
    tl.store(brackets + place * 4 + 3, expected)


@triton.jit
def load_bracket(brackets, place):
    """`low` belongs to the range, `high` does not; `above`: how many logits have at least `high`, or their weight;
    `expected`: how many of a split may lie in the range.

    An infinite `low`: the row has no limit.
    """
    start = brackets + place * 4
    return tl.load(start), tl.load(start + 1), tl.load(start + 2), tl.load(start + 3)


@triton.jit
def bound_kernel(
    seats, numbers, biggest, totals, row_biggest, part_maxima, brackets, wanted, hit_parts, hit_counts, vocab_size,
    splits,
    SPLITS: tl.constexpr, SPLIT_PARTS: tl.constexpr, FEW_PARTS: tl.constexpr, PIVOTS: tl.constexpr,
    ROUNDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: its largest logit, the first range, how many tokens or how much weight the limit leaves, and which parts
    reach into the range, if they are few.

    A row has at least as many tokens, and as much weight, as the largest logits of its parts have. And all logits of
    less weight than (1 - p) / V of the sum weigh less than 1 - p together.
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
    limit, top_p = row_limit(own, vocab_size), tl.load(own + TOP_P)
    lowest = lowest_logit(own, base, sharpness)
    low, high, expected, goal, num_hits = float("inf"), float("inf"), 0.0, 0.0, 0
    has_limit = (limit < vocab_size) | (top_p < 1.0)
    if is_drawn(own, seat, base) & (has_limit | (lowest > float("-inf"))):
        parts = part_maxima + row * splits * SPLIT_PARTS
        place = tl.arange(0, SPLITS * SPLIT_PARTS)
        lengths = tl.where(place < splits * SPLIT_PARTS, SPLIT_PARTS, 0)
        end = ordered(tl.where(base == 0.0, 0.0, base)).to(tl.int64) + 1  # -0.0 is no smaller than 0.0
        high = logit_of(end)
        first = ordered(tl.maximum(base - tl.div_rn(NO_WEIGHT, sharpness), -3.0e38)).to(tl.int64)
        part_largest = tl.load(parts + place, mask=lengths > 0, other=float("-inf"))
        if limit < vocab_size:
            goal = limit.to(tl.float32)
            if limit <= tl.sum((part_largest > float("-inf")).to(tl.int32), 0):
                smallest = tl.min(tl.where(part_largest > float("-inf"), part_largest, float("inf")), 0)
                first = tl.maximum(first, ordered(smallest).to(tl.int64))
                first = last_key(
                    parts, SPLIT_PARTS, lengths, SPLIT_PARTS, first, end, 0.0, goal, base, sharpness, ROUNDS,
                    False, SPLIT_PARTS, PIVOTS,
                )  # fmt: skip
            else:
                expected = UNKNOWN
        elif top_p < 1.0:
            goal = top_p * total
            share = 0.5 * (1.0 - top_p) * total / vocab_size
            first = tl.maximum(first, ordered(base + tl.div_rn(tl.log(share), sharpness)).to(tl.int64))
            first = last_key(
                parts, SPLIT_PARTS, lengths, SPLIT_PARTS, first, end, 0.0, goal, base, sharpness, ROUNDS,
                True, SPLIT_PARTS, PIVOTS,
            )  # fmt: skip
            expected = UNKNOWN
        low = logit_of(first)
        has_two = (limit < vocab_size) & (top_p < 1.0)
        if not has_two:  # what lies below counts for top-p after top-k
            low = tl.maximum(low, lowest)
        is_hit = part_largest >= low
        num_hits = tl.sum(is_hit.to(tl.int32), 0)
        if num_hits <= FEW_PARTS:
            slot = tl.cumsum(is_hit.to(tl.int32), 0) - 1
            tl.store(hit_parts + row * FEW_PARTS + slot, place, mask=is_hit)
        else:
            num_hits = 0
        if (num_hits > 0) | has_two:
            expected = 0.0
        if (num_hits == 0) & (has_limit == 0):
            high = low
    tl.store(wanted + row, goal)
    tl.store(hit_counts + row, num_hits)
    store_bracket(brackets, row, low, high, 0.0, expected)


@triton.jit
def narrowed(
    brackets, pivots, measures, wanted, own, row_biggest, sharpness, row, num_rows, vocab_size, splits,
    PASS: tl.constexpr, SPLITS: tl.constexpr, PIVOTS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The bracket of a row after PASS passes, from the bracket before the last one and what that one measured."""
    if PASS == 0:
        low, high, above, expected = load_bracket(brackets, row)
    else:
        place = (PASS - 1) * num_rows + row
        low, high, above, expected = load_bracket(brackets, place)
        if expected > FEW:
            split, pivot = tl.arange(0, SPLITS), tl.arange(0, PIVOTS)
            target = measures + ((place * splits + split) * PIVOTS)[:, None] + pivot[None, :]
            split_sums = tl.load(target, mask=(split < splits)[:, None], other=0.0)
            sums = tl.sum(split_sums, 0)
            logits = tl.load(pivots + place * PIVOTS + pivot)
            is_inner = (pivot > 0) & (pivot < PIVOTS - 1)
            last = tl.sum((is_inner & (sums >= tl.load(wanted + row))).to(tl.int32), 0)
            low, high, above = element(logits, last), element(logits, last + 1), element(sums, last + 1)
            signs = (pivot == last).to(tl.float32) - (pivot == last + 1).to(tl.float32)
            expected = tl.max(tl.sum(split_sums * signs[None, :], 1), 0)
            if row_limit(own, vocab_size) == vocab_size:  # none of them weighs less than the range's smallest
                expected = expected / tl.exp((low - tl.load(row_biggest + row)) * sharpness)
    return low, high, above, expected


@triton.jit
def narrow_kernel(
    logits, seats, numbers, row_biggest, hit_counts, brackets, pivots, measures, wanted, stride, num_rows, vocab_size,
    splits,
    PASS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr, PIVOTS: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """EACH splits: how many of a split's logits have at least each pivot, or their weight.

    The pivots go from `low` to `high`.
    """
    wait_for_last(OVERLAPS)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH
    if tl.load(hit_counts + row) == 0:
        seat = tl.load(seats + row)
        own, sharpness = row_numbers(numbers, seat), row_sharpness(numbers, seat)
        low, high, above, expected = narrowed(
            brackets, pivots, measures, wanted, own, row_biggest, sharpness, row, num_rows, vocab_size, splits,
            PASS, SPLITS, PIVOTS, FEW,
        )  # fmt: skip
        place = PASS * num_rows + row
        if (PASS > 0) & (first == 0):
            store_bracket(brackets, place, low, high, above, expected)
        if expected > FEW:
            base = tl.load(row_biggest + row)
            by_count = row_limit(own, vocab_size) < vocab_size
            pivot = tl.arange(0, PIVOTS)
            pivot_logits = low + (high - low) * (pivot.to(tl.float32) / (PIVOTS - 1))
            pivot_logits = tl.where(pivot == PIVOTS - 1, high, pivot_logits)
            if first == 0:
                tl.store(pivots + place * PIVOTS + pivot, pivot_logits)
            for split in range(first, tl.minimum(first + EACH, splits)):
                sums = tl.zeros([PIVOTS, BLOCK], dtype=tl.float32)
                for begin in tl.static_range(0, SPLIT, BLOCK):
                    token = split * SPLIT + begin + tl.arange(0, BLOCK)
                    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf"))
                    weights = tl.where(by_count, 1.0, tl.exp((values - base) * sharpness))
                    sums += (values[None, :] >= pivot_logits[:, None]).to(tl.float32) * weights[None, :]
                tl.store(measures + (place * splits + split) * PIVOTS + pivot, tl.sum(sums, 1))
