"""Causal attention of many queries: packed sequences in the trainer, chunks over a block cache in the engine.

One kernel for both, and for runs of queries that each attend to a run of keys.

A query's result depends on its sequence alone: keys are taken in tiles of a fixed size from position 0 (or from the
tile where its tile's window begins), and tiles that a row cannot see change no bit of it. So the bits are the same
packed or paged, whole or in chunks, in whatever batch. T tokens, S sequences, N heads, K kv heads, G = N / K, H
head_dim.

Called by `packed` and `paged`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.attention.tile import find_sequence, key_places, load_rows, softmax_step, tile_blocks
from stoker.model.kernels.runs import AttentionRuns

LOWEST = tl.constexpr(-1.0e30)
"""A running maximum below every score, yet finite: a row that has seen nothing makes no NaN."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """The tiling of the work. It is part of the result's bits, so it depends on dtype and head size only."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def forward_config(dtype: torch.dtype, head_dim: int) -> TileConfig:
    if dtype is torch.float32:
        return TileConfig(rows=32, keys=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return TileConfig(rows=64, keys=64, num_warps=4, num_stages=2)
    return TileConfig(rows=128, keys=64, num_warps=8, num_stages=3)


def tile_queries(config: TileConfig, group: int) -> int:
    """Queries of one tile, whose rows are (query, head) pairs."""
    if group > config.rows:
        raise ValueError(f"attention: {group} heads share a kv head; at most {config.rows} can")
    return config.rows // group


def precision(dtype: torch.dtype) -> str:
    """Precision of products: full float32 for float32; the other dtypes have no choice."""
    return "ieee" if dtype is torch.float32 else "tf32"


def check_scale(scale: float) -> None:
    if not scale > 0:
        raise ValueError(f"attention: scale must be > 0, not {scale}")


def attend_forward(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    *,
    num_sequences: int,
    scale: float,
    window: int | None,
    seq_lens: Tensor | None = None,
    block_tables: Tensor | None = None,
    out_TNH: Tensor | None = None,
    lse_TN: Tensor | None = None,
    config: TileConfig | None = None,
    runs: AttentionRuns | None = None,
) -> Tensor:
    """out_TNH, and into `lse_TN` (float32) the log2 of each row's sum where it is given.

    Packed: k and v are [T, K, H]. Paged: they are [blocks, block_size, K, H] views of one layer's keys and values, with
    `seq_lens` [S] (0: nothing is done) and `block_tables` [S, B]; `query_start` may begin behind 0. Rows that belong to
    no sequence are not written. With `runs` (`query_start` is theirs) k and v are those of the runs.
    """
    check_scale(scale)
    num_tokens, num_heads, head_dim = q_TNH.shape
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out_TNH is None else out_TNH
    if num_tokens == 0 or num_sequences == 0:
        return out_TNH
    is_paged = block_tables is not None
    num_kv_heads = k.shape[-2]
    group = num_heads // num_kv_heads
    config = forward_config(q_TNH.dtype, head_dim) if config is None else config
    grid = (num_kv_heads, num_tokens // tile_queries(config, group) + num_sequences)
    attention_kernel[grid](
        q_TNH,
        k,
        v,
        out_TNH,
        lse_TN,
        query_start,
        seq_lens,
        block_tables,
        None if runs is None else runs.key_start,
        None if runs is None else runs.distances,
        num_sequences,
        scale * LOG2_E,
        0 if window is None else window,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k.stride(0) if is_paged else 0,
        k.stride(-3),
        k.stride(-2),
        v.stride(0) if is_paged else 0,
        v.stride(-3),
        v.stride(-2),
        block_tables.stride(0) if block_tables is not None else 0,
        NUM_HEADS=num_heads,
        G=group,
        HEAD_DIM=head_dim,
        H=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=k.shape[1] if is_paged else 0,
        HAS_WINDOW=window is not None,
        PRECISION=precision(q_TNH.dtype),
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    return out_TNH


@triton.jit(
    do_not_specialize=["num_sequences", "window"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "tables_ptr", "key_start_ptr", "distances_ptr"],
)
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    key_start_ptr,
    distances_ptr,
    num_sequences,
    scale_log2,
    window,
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
):
    """Program (kv head, tile of queries); the last tiles, which see the most keys, start first."""
    TILE_QUERIES: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = find_sequence(tile, query_start_ptr, num_sequences, TILE_QUERIES)
    query_begin = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - query_begin
    first = (tile - query_begin // TILE_QUERIES - sequence) * TILE_QUERIES
    seq_len = num_queries
    if BLOCK_SIZE > 0:
        seq_len = tl.load(seq_lens_ptr + sequence)
    if (first < 0) | (first >= num_queries) | (seq_len == 0):
        return
    key_begin = query_begin
    distance = seq_len - num_queries
    if key_start_ptr is not None:
        key_begin = tl.load(key_start_ptr + sequence)
        seq_len = tl.load(key_start_ptr + sequence + 1) - key_begin
        distance = tl.load(distances_ptr + sequence)

    rows = tl.arange(0, BLOCK_M)
    queries = first + rows // G
    heads = kv_head * G + rows % G
    is_row = (rows < TILE_QUERIES * G) & (queries < num_queries)
    positions = distance + queries
    tokens = (query_begin + queries).to(tl.int64)
    q = load_rows(q_ptr, tokens * stride_qt + heads * stride_qh, is_row, HEAD_DIM, H, True)

    first_position = distance + first
    end = tl.minimum(first_position + TILE_QUERIES, seq_len)
    if BLOCK_SIZE == 0:
        k_base = k_ptr + key_begin.to(tl.int64) * stride_kt + kv_head * stride_kh
        v_base = v_ptr + key_begin.to(tl.int64) * stride_vt + kv_head * stride_vh
        table = tables_ptr
    else:
        k_base = k_ptr + kv_head * stride_kh
        v_base = v_ptr + kv_head * stride_vh
        table = tables_ptr + sequence.to(tl.int64) * stride_table
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        all_visible = begin
    else:
        begin = 0
        all_visible = (first_position + 1) // BLOCK_N * BLOCK_N
        if key_start_ptr is not None:  # the keys may end before the queries
            all_visible = tl.minimum(all_visible, seq_len // BLOCK_N * BLOCK_N)

    out = tl.zeros((BLOCK_M, H), tl.float32)
    biggest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    keys = tl.arange(0, BLOCK_N)
    blocks = tile_blocks(begin, end, table, BLOCK_SIZE, BLOCK_N)
    for n in range(begin, all_visible, BLOCK_N):  # every row sees every key
        k_place, k_offsets = key_places(n, blocks, stride_kb, stride_kt, BLOCK_SIZE, BLOCK_N)
        v_place, v_offsets = key_places(n, blocks, stride_vb, stride_vt, BLOCK_SIZE, BLOCK_N)
        blocks = tile_blocks(n + BLOCK_N, end, table, BLOCK_SIZE, BLOCK_N)
        k = load_rows(k_base + k_place, k_offsets, keys < BLOCK_N, HEAD_DIM, H, False)
        v = load_rows(v_base + v_place, v_offsets, keys < BLOCK_N, HEAD_DIM, H, False)
        out, biggest, total = softmax_step(q, k, v, out, biggest, total, keys, scale_log2, False, PRECISION)
    for n in range(all_visible, end, BLOCK_N):  # the diagonal, or a window
        k_place, k_offsets = key_places(n, blocks, stride_kb, stride_kt, BLOCK_SIZE, BLOCK_N)
        v_place, v_offsets = key_places(n, blocks, stride_vb, stride_vt, BLOCK_SIZE, BLOCK_N)
        blocks = tile_blocks(n + BLOCK_N, end, table, BLOCK_SIZE, BLOCK_N)
        k = load_rows(k_base + k_place, k_offsets, n + keys < end, HEAD_DIM, H, True)
        v = load_rows(v_base + v_place, v_offsets, n + keys < end, HEAD_DIM, H, True)
        visible = (n + keys)[None, :] <= positions[:, None]
        if key_start_ptr is not None:
            visible = visible & (n + keys < end)[None, :]
        if HAS_WINDOW:
            visible = visible & ((n + keys)[None, :] > positions[:, None] - window)
        out, biggest, total = softmax_step(q, k, v, out, biggest, total, visible, scale_log2, True, PRECISION)

    total = tl.where(total > 0, total, 1.0)  # rows beyond the queries
    out = out / total[:, None]
    columns = tl.arange(0, H)
    out_rows = (tokens * NUM_HEADS + heads) * HEAD_DIM
    tl.store(
        out_ptr + out_rows[:, None] + columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (columns[None, :] < HEAD_DIM),
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + tokens * NUM_HEADS + heads, biggest + tl.log2(total), mask=is_row)
