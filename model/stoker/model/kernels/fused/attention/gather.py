"""Copies keys and values of whole sequences out of the cache's blocks, one after another.

S sequences, L keys of all of them, K kv heads, H head_dim.

Reads the cache; called by `prompts`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 16
"""Keys of one program."""
COLUMNS = 1024
"""Numbers of a key, over all heads, that one program copies."""


def gather_keys(
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    key_start: Tensor,
    longest: int,
    keys_LKH: Tensor,
    values_LKH: Tensor,
) -> None:
    """Copy the first keys of each sequence to `[key_start[i], key_start[i + 1])`, and its values.

    k and v are [blocks, block_size, K, H] views of one layer; `block_tables` [S, B]; `key_start` int32 [S + 1] on the
    device; `longest`: most keys of a sequence.
    """
    width = k.shape[2] * k.shape[3]
    assert k.stride(2) == k.shape[3], "a key's heads lie one after another"
    grid = (triton.cdiv(longest, TILE), len(key_start) - 1, triton.cdiv(width, COLUMNS))
    gather_kernel[grid](
        k,
        v,
        keys_LKH,
        values_LKH,
        block_tables,
        key_start,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        block_tables.stride(0),
        WIDTH=width,
        BLOCK_SIZE=k.shape[1],
        TILE=TILE,
        COLUMNS=min(COLUMNS, triton.next_power_of_2(width)),
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["tables_ptr", "key_start_ptr"])
def gather_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    key_start_ptr,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    stride_table,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (tile of keys, sequence, tile of columns)."""
    sequence = tl.program_id(1)
    begin = tl.load(key_start_ptr + sequence)
    num_keys = tl.load(key_start_ptr + sequence + 1) - begin
    first = tl.program_id(0) * TILE
    if first >= num_keys:
        return
    keys = first + tl.arange(0, TILE)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = keys < num_keys
    blocks = tl.load(tables_ptr + sequence.to(tl.int64) * stride_table + keys // BLOCK_SIZE, mask=inside, other=0)
    blocks = blocks.to(tl.int64)
    is_element = inside[:, None] & (columns < WIDTH)[None, :]
    targets = (begin + keys).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    k_places = (blocks * stride_kb + (keys % BLOCK_SIZE) * stride_kt)[:, None] + columns[None, :]
    v_places = (blocks * stride_vb + (keys % BLOCK_SIZE) * stride_vt)[:, None] + columns[None, :]
    k = tl.load(k_ptr + k_places, mask=is_element)
    v = tl.load(v_ptr + v_places, mask=is_element)
    tl.store(keys_ptr + targets, k, mask=is_element)
    tl.store(values_ptr + targets, v, mask=is_element)
