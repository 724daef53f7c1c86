"""Attention of one query per sequence over a block cache.

The keys of a sequence are cut into splits that different programs read at the same time; the last one to finish puts
their results together.

The number of splits follows from the number of rows alone, so a launch can be captured in a graph: splits beyond a
sequence's end leave at once. The parts are added in the order of the splits, so a result repeats bitwise. S sequences,
N heads, K kv heads, G = N / K, H head_dim.

Reads the cache and changes nothing. Called by `paged`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.attention.forward import LOG2_E, LOWEST, check_scale, precision
from stoker.model.kernels.fused.attention.splits import (
    LONG_KEYS,
    MAX_SPLITS,
    DecodeScratch,
    is_small,
    num_splits,
    split_keys,
)
from stoker.model.kernels.fused.attention.tile import key_places, load_rows, softmax_step, tile_blocks
from stoker.model.kernels.fused.launch import overlap, wait_for_last


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The way a split's keys are taken."""

    keys: int
    """Keys of one tile."""
    num_warps: int
    num_stages: int
    parts: int = 32
    """Rows (one per part and head) that are put together at once."""


def decode_config(dtype: torch.dtype, head_dim: int, num_rows: int, num_kv_heads: int) -> DecodeConfig:
    if dtype is torch.float32 or head_dim > 128:
        return DecodeConfig(keys=32, num_warps=4, num_stages=2)
    if is_small(num_rows, num_kv_heads):
        return DecodeConfig(keys=32, num_warps=2, num_stages=2)
    return DecodeConfig(keys=64, num_warps=4, num_stages=3)


def attend_decode(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scratch: DecodeScratch,
    *,
    num_sequences: int,
    scale: float,
    window: int | None,
    out_TNH: Tensor | None = None,
    config: DecodeConfig | None = None,
    min_keys: int | None = None,
    splits: int | None = None,
    long_keys: int = LONG_KEYS,
) -> Tensor:
    """out_TNH, whose row i is sequence i's query; further rows are not touched. k and v are [blocks, block_size, K, H]
    views of one layer.

    A sequence of length 0 gives zeros.
    """
    check_scale(scale)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out_TNH is None else out_TNH
    if num_sequences == 0:
        return out_TNH
    num_heads, head_dim = q_TNH.shape[1:]
    num_kv_heads, group = k.shape[2], num_heads // k.shape[2]
    config = decode_config(q_TNH.dtype, head_dim, num_sequences, num_kv_heads) if config is None else config
    if splits is None:
        splits = num_splits(num_sequences, num_kv_heads, block_tables.shape[1] * k.shape[1])
    attention_decode_kernel[(num_kv_heads, splits, num_sequences)](
        q_TNH,
        k,
        v,
        out_TNH,
        scratch.out,
        scratch.sums,
        scratch.arrived,
        seq_lens,
        block_tables,
        scale * LOG2_E,
        0 if window is None else window,
        split_keys(num_sequences, num_kv_heads) if min_keys is None else min_keys,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        G=group,
        HEAD_DIM=head_dim,
        H=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=k.shape[1],
        HAS_WINDOW=window is not None,
        PRECISION=precision(q_TNH.dtype),
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=config.keys,
        LONG_KEYS=long_keys,
        SHORT_SPLITS=MAX_SPLITS,
        HEADS=triton.next_power_of_2(group),
        PARTS=max(1, config.parts // triton.next_power_of_2(group)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
        **overlap(),
    )
    return out_TNH


@triton.jit(do_not_specialize=["window", "min_keys"], do_not_specialize_on_alignment=["seq_lens_ptr", "tables_ptr"])
def attention_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_out_ptr,
    part_sums_ptr,
    arrived_ptr,
    seq_lens_ptr,
    tables_ptr,
    scale_log2,
    window,
    min_keys,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    NUM_HEADS: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG_KEYS: tl.constexpr,
    SHORT_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (kv head, split, sequence)."""
    wait_for_last(OVERLAPS)  # also programs without keys: what comes next relies on all of them
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    sequence = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + sequence)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(seq_len - window, 0) // BLOCK_N * BLOCK_N
    most = tl.minimum(tl.maximum(tl.cdiv(seq_len - begin, LONG_KEYS), SHORT_SPLITS), splits)
    wanted = tl.minimum(tl.cdiv(seq_len - begin, min_keys), most)
    split_keys = tl.cdiv(tl.cdiv(seq_len - begin, tl.maximum(wanted, 1)), BLOCK_N) * BLOCK_N
    active = tl.cdiv(seq_len - begin, tl.maximum(split_keys, 1))  # rounding up may leave splits without keys
    if split >= tl.maximum(active, 1):
        return

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, H)
    is_row = rows < G
    head_rows = kv_head * G + rows
    q_offsets = sequence.to(tl.int64) * stride_qt + head_rows.to(tl.int64) * stride_qh
    q = load_rows(q_ptr, q_offsets, is_row, HEAD_DIM, H, True)
    first = begin + split * split_keys
    end = tl.minimum(first + split_keys, seq_len)
    table = tables_ptr + sequence.to(tl.int64) * stride_table
    out = tl.zeros((BLOCK_M, H), tl.float32)
    biggest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    blocks = tile_blocks(first, end, table, BLOCK_SIZE, BLOCK_N)
    for n in range(first, end, BLOCK_N):
        k_place, k_offsets = key_places(n, blocks, stride_kb, stride_kt, BLOCK_SIZE, BLOCK_N)
        v_place, v_offsets = key_places(n, blocks, stride_vb, stride_vt, BLOCK_SIZE, BLOCK_N)
        blocks = tile_blocks(n + BLOCK_N, end, table, BLOCK_SIZE, BLOCK_N)
        keys = n + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + kv_head * stride_kh + k_place, k_offsets, keys < end, HEAD_DIM, H, True)
        v = load_rows(v_ptr + kv_head * stride_vh + v_place, v_offsets, keys < end, HEAD_DIM, H, True)
        visible = (keys < end)[None, :]
        if HAS_WINDOW:
            visible = visible & (keys >= seq_len - window)[None, :]
        out, biggest, total = softmax_step(q, k, v, out, biggest, total, visible, scale_log2, True, PRECISION)

    out_rows = (sequence.to(tl.int64) * NUM_HEADS + head_rows) * HEAD_DIM
    is_element = is_row[:, None] & (columns[None, :] < HEAD_DIM)
    if active <= 1:  # also a padded sequence, whose sum is 0
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + out_rows[:, None] + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=is_element)
    else:
        task = (sequence * tl.num_programs(0) + kv_head).to(tl.int64)
        part_rows = (task * splits + split) * G + rows
        tl.store(part_out_ptr + part_rows[:, None] * HEAD_DIM + columns[None, :], out, mask=is_element)
        num_parts = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * splits * G
        tl.store(part_sums_ptr + part_rows, biggest, mask=is_row)
        tl.store(part_sums_ptr + num_parts + part_rows, total, mask=is_row)
        tl.debug_barrier()  # all threads' parts are written before one of them says so
        if tl.atomic_add(arrived_ptr + task, 1, sem="acq_rel") == active - 1:
            tl.atomic_xchg(arrived_ptr + task, 0)  # ready for the next launch
            combine(
                part_out_ptr,
                part_sums_ptr,
                num_parts,
                task * splits,
                active,
                out_ptr,
                sequence.to(tl.int64) * NUM_HEADS + kv_head * G,
                G,
                HEAD_DIM,
                H,
                HEADS,
                PARTS,
            )


@triton.jit
def combine(
    part_out_ptr,
    part_sums_ptr,
    num_parts,
    first_part,
    active,
    out_ptr,
    first_row,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weigh the parts of one sequence and kv head by their maxima and add them, some at a time and in their order."""
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, H)
    out = tl.zeros((HEADS, H), tl.float32)
    biggest = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for begin in range(0, active, PARTS):
        parts = begin + tl.arange(0, PARTS)
        part_rows = (first_part + parts)[:, None] * G + heads[None, :]
        is_part = (parts < active)[:, None] & (heads < G)[None, :]
        part_biggest = tl.load(part_sums_ptr + part_rows, mask=is_part, other=LOWEST, cache_modifier=".cg")
        part_total = tl.load(part_sums_ptr + num_parts + part_rows, mask=is_part, other=0.0, cache_modifier=".cg")
        part_out = tl.load(
            part_out_ptr + part_rows[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=is_part[:, :, None] & (columns < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_biggest = tl.maximum(biggest, tl.max(part_biggest, 0))
        weights = tl.exp2(part_biggest - new_biggest[None, :])
        shrink = tl.exp2(biggest - new_biggest)
        total = total * shrink + tl.sum(part_total * weights, 0)
        out = out * shrink[:, None] + tl.sum(part_out * weights[:, :, None], 0)
        biggest = new_biggest
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + (first_row + heads)[:, None] * HEAD_DIM + columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(heads < G)[:, None] & (columns < HEAD_DIM)[None, :],
    )
