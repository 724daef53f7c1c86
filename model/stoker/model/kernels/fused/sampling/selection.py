"""The limit itself: the logits of a row's range are listed, the last of them that belongs to the row is found, and what
each split keeps is summed.

Where few parts reach into the range, the row's program lists what they have. Else each split lists its own, and where
one has more than fit, the row itself is the list.

Called by `limits`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.model.kernels.fused.launch import wait_for_last
from stoker.model.kernels.fused.sampling.bracket import (
    load_bracket,
    lowest_logit,
    narrowed,
    row_limit,
    store_bracket,
)
from stoker.model.kernels.fused.sampling.search import element, last_key, logit_of, measure, ordered
from stoker.model.kernels.fused.sampling.seat import TOP_P, row_numbers, row_sharpness

UNTIL_FOUND = tl.constexpr(64)
"""Rounds of a search that ends before."""


@triton.jit
def slots(taken):
    """The places of a block's selected logits, row after row, and their number."""
    of_rows = tl.sum(taken.to(tl.int32), 1)
    before = tl.cumsum(of_rows, 0) - of_rows
    return before[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1, tl.sum(of_rows, 0)


@triton.jit
def list_kernel(
    logits, seats, numbers, biggest, row_biggest, hit_counts, part_maxima, brackets, pivots, measures, wanted, listed,
    counts,
    weights_above, stride, num_rows, vocab_size, splits,
    PASS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, EACH: tl.constexpr, PIVOTS: tl.constexpr, FEW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """EACH splits: a split's logits in the range, in their order; how many they are, which may be more than fit; and
    the weight of those above the range.

    Parts below the range are not read.
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
        if first == 0:
            store_bracket(brackets, PASS * num_rows + row, low, high, above, expected)
        base = tl.load(row_biggest + row)
        end = tl.where(low < float("inf"), tl.minimum(first + EACH, splits), first)
        for split in range(first, end):
            place = row * splits + split
            largest = tl.load(biggest + place)
            count, weight = 0, 0.0
            if largest >= low:
                for begin in range(0, SPLIT // PART, TILE // PART):
                    part = begin + tl.arange(0, TILE // PART)
                    has_some = tl.load(part_maxima + place * (SPLIT // PART) + part) >= low
                    token = split * SPLIT + part[:, None] * PART + tl.arange(0, PART)[None, :]
                    inside = has_some[:, None] & (token < vocab_size)
                    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
                    taken = (values >= low) & (values < high)
                    slot, more = slots(taken)
                    slot += count
                    tl.store(listed + place * CAPACITY + slot, values, mask=taken & (slot < CAPACITY))
                    weights = tl.where(values >= high, tl.exp((values - base) * sharpness), 0.0)
                    weight += tl.sum(tl.sum(weights, 1), 0)
                    count += more
            tl.store(counts + place, count)
            tl.store(weights_above + place, weight)


@triton.jit
def list_parts(
    logits, hit_parts, num_hits, low, vocab_size, listed, listed_splits, room,
    PART: tl.constexpr, SPLIT_PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List a row's logits from `low` on, in their order, and the split of each, from the parts that have some; how many
    they are, which may be more than there is room.
    """
    count = 0
    for begin in range(0, num_hits, TILE // PART):
        hit = begin + tl.arange(0, TILE // PART)
        part = tl.load(hit_parts + hit, mask=hit < num_hits, other=0)
        token = part[:, None] * PART + tl.arange(0, PART)[None, :]
        inside = (hit < num_hits)[:, None] & (token < vocab_size)
        values = tl.load(logits + token, mask=inside, other=float("-inf"))
        taken = values >= low
        slot, more = slots(taken)
        slot += count
        tl.store(listed + slot, values, mask=taken & (slot < room))
        tl.store(listed_splits + slot, (part[:, None] // SPLIT_PARTS).to(tl.int16), mask=taken & (slot < room))
        count += more
    tl.debug_barrier()  # other threads read what these wrote
    return count


@triton.jit
def select_kernel(
    logits, seats, numbers, row_biggest, hit_parts, hit_counts, brackets, wanted, listed, listed_splits, counts,
    weights_above,
    thresholds, totals, stride, num_rows, vocab_size, splits,
    PASS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr, FEW_PARTS: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: the smallest logit that min-p, top-k and top-p leave, and the sums of its splits from there on."""
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    num_hits = tl.load(hit_counts + row)
    low, high, above, _expected = load_bracket(brackets, tl.where(num_hits > 0, 0, PASS * num_rows) + row)
    threshold = float("-inf")
    if low < float("inf"):
        seat = tl.load(seats + row)
        own, sharpness = row_numbers(numbers, seat), row_sharpness(numbers, seat)
        limit, top_p = row_limit(own, vocab_size), tl.load(own + TOP_P)
        base, goal = tl.load(row_biggest + row), tl.load(wanted + row)
        split, segment = tl.arange(0, SPLITS), tl.arange(0, SPLITS * COLUMNS) // COLUMNS
        own_lists = tl.where(num_hits > 0, 0, splits)
        start, step = listed + row * splits * CAPACITY, CAPACITY
        sums = tl.load(weights_above + row * splits + split, mask=split < own_lists, other=0.0)
        lengths = tl.load(counts + row * splits + segment, mask=segment < own_lists, other=0)
        longest, count = tl.max(lengths, 0), 0
        is_whole = longest > CAPACITY
        if num_hits > 0:
            room = splits * CAPACITY
            count = list_parts(
                logits + row * stride, hit_parts + row * FEW_PARTS, num_hits, low, vocab_size,
                start, listed_splits + row * room, room, PART, SPLIT // PART, TILE,
            )  # fmt: skip
            is_whole = count > room
            step = (count + SPLITS - 1) // SPLITS
            lengths = tl.minimum(tl.maximum(count - segment * step, 0), step)
            longest = step
        if is_whole:
            start, step, longest = logits + row * stride, SPLIT, SPLIT
            lengths = tl.minimum(tl.maximum(vocab_size - segment * SPLIT, 0), SPLIT)
            sums = tl.zeros([SPLITS], dtype=tl.float32)
            above = 0.0
        found, beyond = ordered(low).to(tl.int64), ordered(high).to(tl.int64)
        if limit < vocab_size:
            found = last_key(
                start, step, lengths, longest, found, beyond, above, goal, base, sharpness, UNTIL_FOUND,
                False, COLUMNS, PIVOTS,
            )  # fmt: skip
            if top_p < 1.0:  # of equal logits at the limit only as many count as it leaves
                pair = logit_of(found + tl.arange(0, 2))
                tokens = measure(start, step, lengths, longest, pair, base, sharpness, False, COLUMNS)
                weights = measure(start, step, lengths, longest, pair, base, sharpness, True, COLUMNS)
                ties = (goal - element(tokens, 1)) * tl.exp((logit_of(found) - base) * sharpness)
                goal = top_p * tl.where(element(tokens, 0) > goal, element(weights, 1) + ties, element(weights, 0))
        if top_p < 1.0:
            found = last_key(
                start, step, lengths, longest, found, beyond, tl.sum(sums, 0), goal, base, sharpness, UNTIL_FOUND,
                True, COLUMNS, PIVOTS,
            )  # fmt: skip
        threshold = tl.maximum(logit_of(found), lowest_logit(own, base, sharpness))
        if (num_hits == 0) | is_whole:
            split_lengths = tl.load(counts + row * splits + split, mask=split < own_lists, other=0)
            whole_lengths = tl.minimum(tl.maximum(vocab_size - split * SPLIT, 0), SPLIT)
            split_lengths = tl.where(is_whole, whole_lengths, split_lengths)
            for begin in range(0, longest, COLUMNS):
                column = begin + tl.arange(0, COLUMNS)[None, :]
                inside = column < split_lengths[:, None]
                values = tl.load(start + split[:, None] * step + column, mask=inside, other=float("-inf"))
                weights = tl.where(values >= threshold, tl.exp((values - base) * sharpness), 0.0)
                sums += tl.sum(weights, 1)
        else:
            for begin in range(0, count, COLUMNS):
                slot = begin + tl.arange(0, COLUMNS)
                values = tl.load(start + slot, mask=slot < count, other=float("-inf"))
                weights = tl.where(values >= threshold, tl.exp((values - base) * sharpness), 0.0)
                own_split = tl.load(listed_splits + row * splits * CAPACITY + slot, mask=slot < count, other=0)
                sums += tl.sum(tl.where(own_split.to(tl.int32)[None, :] == split[:, None], weights[None, :], 0.0), 1)
        tl.store(totals + row * splits + split, sums.to(tl.float64), mask=split < splits)
    tl.store(thresholds + row, threshold)
