"""Shared parts of the attention kernels: the sequence of a tile, the place of its keys, the running softmax.

Rows of a tile are (query, head) pairs: the G heads of a kv head stand side by side, so that keys and values are read
once for all of them. Scores are in units of log2, so that the hardware's exp2 serves as the softmax's exponential.

Device functions without state; called by `forward`, `backward` and `decode`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(tile, query_start, num_sequences, TILE_QUERIES: tl.constexpr):
    """Find the sequence of tile number `tile`.

    Sequence i owns the tiles from query_start[i] // TILE_QUERIES + i on, so nothing has to be counted beforehand.
    """
    low = tile * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(query_start + middle) // TILE_QUERIES + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def tile_blocks(begin, end, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of the tile of keys at `begin`, or of each of its keys where blocks are smaller.

    Nothing beyond `end` is read, and there the answer is any block. Asked for one tile ahead, it costs no wait.
    """
    if BLOCK_SIZE == 0:
        blocks = tl.cast(begin, tl.int32)
    elif BLOCK_SIZE % BLOCK_N == 0:
        blocks = tl.load(table + tl.minimum(begin, tl.maximum(end - 1, 0)) // BLOCK_SIZE)
    else:
        keys = begin + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return blocks


@triton.jit
def key_places(begin, blocks, stride_block, stride_row, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the keys of a tile lie, in elements.

    (int64 place of the tile, [BLOCK_N] offsets of its rows from there). BLOCK_SIZE 0: one after another; else in the
    given blocks.
    """
    rows = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE == 0:
        place = tl.cast(begin, tl.int64) * stride_row
        offsets = rows * stride_row
    elif BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
        place = blocks.to(tl.int64) * stride_block + (begin % BLOCK_SIZE) * stride_row
        offsets = rows * stride_row
    else:
        place = tl.cast(begin, tl.int64) * 0
        offsets = blocks.to(tl.int64) * stride_block + ((begin + rows) % BLOCK_SIZE) * stride_row
    return place, offsets


@triton.jit
def load_rows(base, offsets, is_row, HEAD_DIM: tl.constexpr, H: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, H]; what lies outside is 0, because 0 * NaN would spoil a product."""
    columns = tl.arange(0, H)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        x = tl.load(pointers, mask=is_row[:, None] & (columns[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM != H:
        x = tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def softmax_step(q, k, v, out, biggest, total, visible, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Take one step of the running softmax over a tile of keys: (out, biggest, total) of the rows.

    A tile that is wholly hidden from a row leaves its bits as they are.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_biggest = tl.maximum(biggest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_biggest[:, None])
    shrink = tl.exp2(biggest - new_biggest)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return out, new_biggest, total
