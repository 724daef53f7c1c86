"""Choosing the next tokens without a sort and without a word to the host.

A row is cut into splits of a fixed size, so its token does not depend on its batch. Plain sampling reads the logits once: `scan` gives each split's maximum and its sum of weights,
`draw` finds the split and then the token where the cumulative sum passes the random number, in the order of the vocabulary. With top-k, top-p or min-p four steps stand between: `bound` finds
a logit that cannot lie above the row's threshold, `gather_candidates` takes the logits from there on, mostly a few hundred, `threshold` searches among them (among all where they are too many), and a second scan sums
what is left. Rows without a threshold keep the sums of the first scan, so that they draw the same token beside any other row. B rows, S seats, V vocabulary, L longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.sampling import NUMBERS, Adjustments, SampledTokens, SampleRows, SamplingTable

SPLIT = 4096
"""Logits of one split."""
PART = 128
"""Logits whose maximum is kept for `bound`."""
CANDIDATES = 128
"""Most candidates of one split; rows with more are searched as a whole."""
SEARCH_BLOCK = 8192
"""Logits that the search for a threshold takes at once."""
COUNT_TOKENS = 1024
"""Tokens of the history that one program counts."""
IN_PROMPT = tl.constexpr(1 << 30)
"""Flag in a token's count: it stands in the prompt. The count itself is of the output."""


def sample(
    logits_BV: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    adjustments: Adjustments | None,
    into_SL: Tensor | None,
) -> SampledTokens:
    num_rows, vocab_size = logits_BV.shape
    device = logits_BV.device
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid_B = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return SampledTokens(tokens_B, valid_B)
    logits = logits_BV.float()  # narrower ones would be added in another order than those that were adjusted
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if adjustments is not None:
        logits = adjust(logits, rows, table, adjustments)
    scan = make_scan(logits, rows, table)
    sum_splits(scan, filtered=False)
    if rows.filtered:
        find_thresholds(scan)
        sum_splits(scan, filtered=True)
    draw_kernel[(num_rows,)](
        scan.logits,
        scan.seats,
        scan.numbers,
        scan.biggest,
        scan.best_tokens,
        scan.totals,
        scan.thresholds,
        logits.stride(0),
        vocab_size,
        scan.splits,
        table.keys,
        rows.positions,
        tokens_B,
        valid_B,
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
    return SampledTokens(tokens_B, valid_B)


class Scan(NamedTuple):
    """What the kernels of one call hand on. N splits of a row, P parts of a row."""

    logits: Tensor
    seats: Tensor
    numbers: Tensor
    biggest: Tensor
    """float32 [B, N]: each split's largest logit."""
    best_tokens: Tensor
    """int32 [B, N]: where it stands."""
    totals: Tensor
    """float64 [B, N]: the split's sum of weights, against its largest logit; against the row's where the row has a threshold, from the second scan on."""
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


def sum_splits(scan: Scan, filtered: bool) -> None:
    """Maxima and sums of all splits; with `filtered` the sums of what lies above the rows' thresholds."""
    scan_kernel[(scan.logits.shape[0], scan.splits)](
        *scan[:9],
        scan.logits.stride(0),
        scan.logits.shape[1],
        scan.splits,
        FILTERED=filtered,
        KEEPS_PARTS=scan.filtered and not filtered,
        SPLIT=SPLIT,
        PART=PART,
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )


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


def adjust(logits_BV: Tensor, rows: SampleRows, table: SamplingTable, adjustments: Adjustments) -> Tensor:
    """A copy of the logits (float32) with what is added to some and the penalties of those that were seen."""
    num_rows, vocab_size = logits_BV.shape
    adjusted = logits_BV.clone()
    add_kernel[(num_rows,)](
        adjusted,
        adjustments.entry_start,
        adjustments.entry_tokens,
        adjustments.entry_biases,
        vocab_size,
        BLOCK=128,
        enable_fp_fusion=True,
        num_warps=4,
    )
    if adjustments.penalised:
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits_BV.device)
        history = adjustments.history
        count_kernel[(num_rows, triton.cdiv(history.shape[1], COUNT_TOKENS))](
            counts,
            rows.seats,
            rows.positions,
            table.numbers,
            history,
            adjustments.num_prompt,
            history.stride(0),
            vocab_size,
            BLOCK=COUNT_TOKENS,
            enable_fp_fusion=True,
            num_warps=4,
        )
        penalise_kernel[(num_rows, triton.cdiv(vocab_size, SPLIT))](
            adjusted, counts, rows.seats, table.numbers, vocab_size, BLOCK=SPLIT, enable_fp_fusion=True, num_warps=4
        )
    return adjusted


NUM_NUMBERS = tl.constexpr(len(NUMBERS))
TEMPERATURE = tl.constexpr(NUMBERS.index("temperature"))
TOP_P = tl.constexpr(NUMBERS.index("top_p"))
TOP_K = tl.constexpr(NUMBERS.index("top_k"))
MIN_P = tl.constexpr(NUMBERS.index("min_p"))
PRESENCE = tl.constexpr(NUMBERS.index("presence_penalty"))
FREQUENCY = tl.constexpr(NUMBERS.index("frequency_penalty"))
REPETITION = tl.constexpr(NUMBERS.index("repetition_penalty"))


@triton.jit
def row_numbers(numbers, seat):
    """Where the numbers of a seat begin; those of seat 0 for padding."""
    return numbers + tl.maximum(seat, 0).to(tl.int64) * NUM_NUMBERS


@triton.jit
def row_sharpness(numbers, seat):
    """1 / temperature; 1 for greedy rows, whose draw is not used."""
    temperature = tl.load(row_numbers(numbers, seat) + TEMPERATURE)
    return tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def largest(values, tokens):
    """The largest logit and its token, the first of equal ones."""
    base = tl.max(values, 0)
    return base, tl.min(tl.where(values == base, tokens, 2147483647), 0)


@triton.jit
def scan_kernel(
    logits, seats, numbers, biggest, best_tokens, totals, thresholds, row_biggest, part_maxima, stride, vocab_size, splits,
    FILTERED: tl.constexpr, KEEPS_PARTS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split: its largest logit and token, and the sum of exp((logit - largest) / temperature). FILTERED: the sum of what lies above the row's threshold, if it has one, against its largest."""
    wait_for_last(OVERLAPS)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if FILTERED:  # noqa: SIM102  the compiler decides this one
        if tl.load(thresholds + row) == float("-inf"):
            return
    token = split * SPLIT + tl.arange(0, SPLIT)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)  # a nan makes the row as invalid as an infinity does
    sharpness = row_sharpness(numbers, tl.load(seats + row))
    if FILTERED:
        base = tl.load(row_biggest + row)
        inside = inside & (values >= tl.load(thresholds + row))
    else:
        base, best_token = largest(values, token)
        tl.store(biggest + row * splits + split, base)
        tl.store(best_tokens + row * splits + split, best_token)
    if KEEPS_PARTS:
        parts: tl.constexpr = SPLIT // PART
        place = (row * splits + split) * parts + tl.arange(0, parts)
        tl.store(part_maxima + place, tl.max(tl.reshape(values, [parts, PART]), 1))
    weights = tl.where(inside & (values > float("-inf")), tl.exp((values - base) * sharpness), 0.0)
    tl.store(totals + row * splits + split, tl.sum(weights, 0).to(tl.float64))


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


@triton.jit
def add_kernel(adjusted, entry_start, entry_tokens, entry_biases, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(entry_start + row + 1)
    for begin in range(tl.load(entry_start + row), end, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(entry_tokens + entry, mask=inside, other=0)
        bias = tl.load(entry_biases + entry, mask=inside, other=0.0)
        tl.atomic_add(adjusted + row.to(tl.int64) * vocab_size + token, bias, mask=inside)


@triton.jit
def is_penalised(own):
    repeats = tl.load(own + REPETITION) != 1.0
    return repeats | (tl.load(own + PRESENCE) != 0.0) | (tl.load(own + FREQUENCY) != 0.0)


@triton.jit
def count_kernel(
    counts, seats, positions, numbers, history, num_prompt, history_stride, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    length = tl.load(positions + row)
    if (seat >= 0) & (tl.program_id(1) * BLOCK < length) & is_penalised(row_numbers(numbers, seat)):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(history + seat.to(tl.int64) * history_stride + place, mask=inside, other=0)
        is_output = place >= tl.load(num_prompt + seat)
        target = counts + row * vocab_size + token
        tl.atomic_add(target, 1, mask=inside & is_output)
        tl.atomic_or(target, IN_PROMPT, mask=inside & ~is_output)


@triton.jit
def penalise_kernel(adjusted, counts, seats, numbers, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    own = row_numbers(numbers, seat)
    if (seat >= 0) & is_penalised(own):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(counts + row * vocab_size + token, mask=token < vocab_size, other=0)
        seen = count != 0
        values = tl.load(adjusted + row * vocab_size + token, mask=seen, other=0.0)
        repetition = tl.load(own + REPETITION)
        values = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        output = (count & (IN_PROMPT - 1)).to(tl.float32)
        values -= tl.load(own + FREQUENCY) * output
        values -= tl.where(output > 0.0, tl.load(own + PRESENCE), 0.0)
        tl.store(adjusted + row * vocab_size + token, values, mask=seen)
