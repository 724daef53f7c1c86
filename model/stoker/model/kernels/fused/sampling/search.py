"""The search for a limit: the largest logit from which on a row still has so many tokens, or so much weight.

Logits are compared by integer keys of the same order, so that a range of them can be cut into equal parts until one key
is left. What is searched lies in segments, as many as the row has splits.

Called by `bracket` and `selection`.
"""

from __future__ import annotations

import triton
import triton.language as tl

EVEN_ROUNDS = tl.constexpr(3)


@triton.jit
def ordered(values):
    """Return int32 keys that are ordered as the float32 are."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """Return the logit of a key of `ordered`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def element(vector, place):
    """Return one value of a vector."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == place, vector, 0.0), 0)


@triton.jit
def measure(
    start, step, lengths, longest, pivots, base, sharpness, BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """float32, for each of `pivots`: how many logits are as large, or (BY_WEIGHT) the sum of exp((logit - base) *
    sharpness) of those.

    Segments begin `step` apart from `start` on; `lengths` says for each place of a tile of COLUMNS columns how long its
    segment is, `longest` is the largest of them. Each pivot's sum is taken in the same order, so a smaller one never
    has less.
    """
    place = tl.arange(0, lengths.shape[0])
    result = tl.zeros([pivots.shape[0]], dtype=tl.float32)
    for begin in range(0, longest, COLUMNS):
        column = begin + place % COLUMNS
        inside = column < lengths
        values = tl.load(start + (place // COLUMNS) * step + column, mask=inside, other=float("-inf"))
        weights = tl.exp((values - base) * sharpness) if BY_WEIGHT else inside.to(tl.float32)
        reached = (values[None, :] >= pivots[:, None]).to(
            tl.float32
        )  # times the weight: one instruction less than a choice
        result += tl.sum(reached * weights[None, :], 1)
    return result


@triton.jit
def last_key(
    start, step, lengths, longest, found, beyond, above, wanted, base, sharpness, rounds,
    BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest key from `found` on and before `beyond` whose `above` + `measure` is at least `wanted`, or `found`
    itself, which is not asked.

    Keys are int64 here.

    Or another key between the same two logits: the search ends when one logit is left in the range, or exactly what is
    wanted lies from `found` on. After `rounds` it ends with a smaller key. The first rounds cut the range into equal
    ranges of logits, the others of keys: those get everywhere.
    """
    pivot = tl.arange(0, PIVOTS)
    rounds_done = 0
    beyond_measured = above
    while (beyond - found > 1) & (rounds_done < rounds):
        low, high = logit_of(found), logit_of(beyond)
        even = ordered(low + (high - low) * (pivot.to(tl.float32) / PIVOTS)).to(tl.int64)
        keys = tl.where(rounds_done < EVEN_ROUNDS, even, found + pivot * ((beyond - found + PIVOTS - 1) // PIVOTS))
        keys = tl.where(pivot == 0, found, tl.minimum(tl.maximum(keys, found + 1), beyond))
        measured = above + measure(start, step, lengths, longest, logit_of(keys), base, sharpness, BY_WEIGHT, COLUMNS)
        is_enough = ((measured >= wanted) & (keys < beyond)) | (pivot == 0)
        beyond_measured = tl.maximum(beyond_measured, tl.max(tl.where(is_enough, 0.0, measured), 0))
        found_measured = tl.min(tl.where(is_enough, measured, float("inf")), 0)
        beyond = tl.min(tl.where(is_enough, beyond, keys), 0)
        found = tl.max(tl.where(is_enough, keys, found), 0)
        smallest = tl.exp((logit_of(found) - base) * sharpness) if BY_WEIGHT else 1.0
        if (found_measured == wanted) | (found_measured - beyond_measured < 1.9 * smallest):
            beyond = found + 1
        rounds_done += 1
    return found
