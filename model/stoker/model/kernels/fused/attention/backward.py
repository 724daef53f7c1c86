"""Gradients of causal attention over packed sequences.

No atomics: every gradient is summed by one program in a fixed order, so a backward pass repeats bitwise.

The weights are made again from the scores and the forward's log-sums. One kernel walks the queries for each tile of
keys (gradients of k and v), one walks the keys for each tile of queries (gradient of q). T tokens, S sequences, N
heads, K kv heads, G = N / K, H head_dim; a row is a (query, head) pair as in the forward kernel.

Pure; called by the autograd function of `packed`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.attention.forward import LOG2_E, TileConfig, precision, tile_queries
from stoker.model.kernels.fused.attention.tile import find_sequence, load_rows
from stoker.model.kernels.runs import AttentionRuns


def key_config(dtype: torch.dtype, head_dim: int) -> TileConfig:
    if dtype is torch.float32:
        return TileConfig(rows=32, keys=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return TileConfig(rows=32, keys=64, num_warps=4, num_stages=1)
    return TileConfig(rows=64, keys=128, num_warps=8, num_stages=3)


def query_config(dtype: torch.dtype, head_dim: int) -> TileConfig:
    if dtype is torch.float32:
        return TileConfig(rows=32, keys=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return TileConfig(rows=64, keys=32, num_warps=4, num_stages=1)
    return TileConfig(rows=128, keys=64, num_warps=8, num_stages=3)


def attend_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_TN: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    keys: TileConfig | None = None,
    queries: TileConfig | None = None,
    runs: AttentionRuns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `out_TNH` and `grad_TNH` are contiguous; `lse_TN` is the forward kernel's, in
    log2.

    With `runs` (`cu_seqlens` is their `query_start`) k and v are those of the runs, and the gradients float32: they are
    parts of sums.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, num_sequences = k_TKH.shape[1], len(cu_seqlens) - 1
    group = num_heads // num_kv_heads
    keys = key_config(q_TNH.dtype, head_dim) if keys is None else keys
    queries = query_config(q_TNH.dtype, head_dim) if queries is None else queries
    tile_queries(keys, group)  # refuses what its kernel cannot cut
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype if runs is None else torch.float32, device=x.device)
        for x in (q_TNH, k_TKH, v_TKH)
    )
    inner_TN = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_TNH.device)
    width = max(16, triton.next_power_of_2(head_dim))
    rows = 64
    attention_inner_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        out_TNH,
        grad_TNH,
        inner_TN,
        num_tokens * num_heads,
        HEAD_DIM=head_dim,
        H=width,
        ROWS=rows,
        num_warps=4,
        enable_fp_fusion=True,
    )
    tensors = (q_TNH, k_TKH, v_TKH, grad_TNH, lse_TN, inner_TN)
    numbers = (
        cu_seqlens,
        None if runs is None else runs.key_start,
        None if runs is None else runs.distances,
        num_sequences,
        scale,
        scale * LOG2_E,
        0 if window is None else window,
        *q_TNH.stride()[:2],
        *k_TKH.stride()[:2],
        *v_TKH.stride()[:2],
    )
    constants = {
        "NUM_HEADS": num_heads,
        "G": group,
        "HEAD_DIM": head_dim,
        "H": width,
        "HAS_WINDOW": window is not None,
        "PRECISION": precision(q_TNH.dtype),
    }
    attention_key_grad_kernel[(num_kv_heads, k_TKH.shape[0] // keys.keys + num_sequences)](
        *tensors,
        grad_k,
        grad_v,
        *numbers,
        **constants,
        BLOCK_M=keys.rows,
        BLOCK_N=keys.keys,
        num_warps=keys.num_warps,
        num_stages=keys.num_stages,
        enable_fp_fusion=True,
    )
    attention_query_grad_kernel[(num_kv_heads, num_tokens // tile_queries(queries, group) + num_sequences)](
        *tensors,
        grad_q,
        *numbers,
        **constants,
        BLOCK_M=queries.rows,
        BLOCK_N=queries.keys,
        num_warps=queries.num_warps,
        num_stages=queries.num_stages,
        enable_fp_fusion=True,
    )
    return grad_q, grad_k, grad_v


@triton.jit(do_not_specialize=["num_rows"])
def attention_inner_kernel(
    out_ptr, grad_ptr, inner_ptr, num_rows, HEAD_DIM: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr
):
    """Sum of out * grad over H, per row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows * HEAD_DIM
    out = load_rows(out_ptr, offsets, rows < num_rows, HEAD_DIM, H, True).to(tl.float32)
    grad = load_rows(grad_ptr, offsets, rows < num_rows, HEAD_DIM, H, True).to(tl.float32)
    tl.store(inner_ptr + rows, tl.sum(out * grad, 1), mask=rows < num_rows)


@triton.jit(
    do_not_specialize=["num_sequences", "window"], do_not_specialize_on_alignment=["key_start_ptr", "distances_ptr"]
)
def attention_key_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    inner_ptr,
    grad_k_ptr,
    grad_v_ptr,
    cu_seqlens_ptr,
    key_start_ptr,
    distances_ptr,
    num_sequences,
    scale,
    scale_log2,
    window,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    NUM_HEADS: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (kv head, tile of keys): gradients of its k and v, from every query that sees them.

    The first tiles, which most queries see, start first.
    """
    TILE_QUERIES: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    keys_ptr = cu_seqlens_ptr
    if key_start_ptr is not None:
        keys_ptr = key_start_ptr
    sequence = find_sequence(tile, keys_ptr, num_sequences, BLOCK_N)
    start = tl.load(keys_ptr + sequence)
    seq_len = tl.load(keys_ptr + sequence + 1) - start
    first = (tile - start // BLOCK_N - sequence) * BLOCK_N
    if (first < 0) | (first >= seq_len):
        return
    query_start = start
    num_queries = seq_len
    distance = 0
    if key_start_ptr is not None:
        query_start = tl.load(cu_seqlens_ptr + sequence)
        num_queries = tl.load(cu_seqlens_ptr + sequence + 1) - query_start
        distance = tl.load(distances_ptr + sequence)

    keys = first + tl.arange(0, BLOCK_N)
    is_key = keys < seq_len
    tokens = (start + keys).to(tl.int64)
    k = load_rows(k_ptr, tokens * stride_kt + kv_head * stride_kh, is_key, HEAD_DIM, H, True)
    v = load_rows(v_ptr, tokens * stride_vt + kv_head * stride_vh, is_key, HEAD_DIM, H, True)
    grad_k = tl.zeros((BLOCK_N, H), tl.float32)
    grad_v = tl.zeros((BLOCK_N, H), tl.float32)
    rows = tl.arange(0, BLOCK_M)
    q_offsets = (rows // G) * stride_qt + (rows % G) * stride_qh
    row_offsets = (rows // G) * NUM_HEADS + rows % G
    last = num_queries
    if HAS_WINDOW:
        last = tl.minimum(num_queries, first + BLOCK_N - 1 + window - distance)
    for m in range(tl.maximum(first - distance, 0) // TILE_QUERIES * TILE_QUERIES, last, TILE_QUERIES):
        queries = m + rows // G
        is_row = (rows < TILE_QUERIES * G) & (queries < num_queries)
        positions = queries + distance
        token = tl.cast(query_start + m, tl.int64)
        first_row = token * NUM_HEADS + kv_head * G
        q = load_rows(q_ptr + token * stride_qt + kv_head * G * stride_qh, q_offsets, is_row, HEAD_DIM, H, True)
        grad = load_rows(grad_ptr + first_row * HEAD_DIM, row_offsets * HEAD_DIM, is_row, HEAD_DIM, H, True)
        lse = tl.load(lse_ptr + first_row + row_offsets, mask=is_row, other=0.0)
        inner = tl.load(inner_ptr + first_row + row_offsets, mask=is_row, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        visible = (keys[:, None] <= positions[None, :]) & is_row[None, :]
        if HAS_WINDOW:
            visible = visible & (keys[:, None] > positions[None, :] - window)
        weights = tl.where(visible, tl.exp2(scores * scale_log2 - lse[None, :]), 0.0)
        grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
        grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - inner[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)

    columns = tl.arange(0, H)
    offsets = (tokens * (NUM_HEADS // G) + kv_head) * HEAD_DIM
    is_element = is_key[:, None] & (columns[None, :] < HEAD_DIM)
    pointers = offsets[:, None] + columns[None, :]
    tl.store(grad_k_ptr + pointers, (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=is_element)
    tl.store(grad_v_ptr + pointers, grad_v.to(grad_v_ptr.dtype.element_ty), mask=is_element)


@triton.jit(
    do_not_specialize=["num_sequences", "window"], do_not_specialize_on_alignment=["key_start_ptr", "distances_ptr"]
)
def attention_query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    inner_ptr,
    grad_q_ptr,
    cu_seqlens_ptr,
    key_start_ptr,
    distances_ptr,
    num_sequences,
    scale,
    scale_log2,
    window,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    NUM_HEADS: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (kv head, tile of queries): gradient of its q; the last tiles start first."""
    TILE_QUERIES: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = find_sequence(tile, cu_seqlens_ptr, num_sequences, TILE_QUERIES)
    start = tl.load(cu_seqlens_ptr + sequence)
    num_queries = tl.load(cu_seqlens_ptr + sequence + 1) - start
    first = (tile - start // TILE_QUERIES - sequence) * TILE_QUERIES
    if (first < 0) | (first >= num_queries):
        return
    key_start = start
    seq_len = num_queries
    distance = 0
    if key_start_ptr is not None:
        key_start = tl.load(key_start_ptr + sequence)
        seq_len = tl.load(key_start_ptr + sequence + 1) - key_start
        distance = tl.load(distances_ptr + sequence)

    rows = tl.arange(0, BLOCK_M)
    queries = first + rows // G
    positions = queries + distance
    heads = kv_head * G + rows % G
    is_row = (rows < TILE_QUERIES * G) & (queries < num_queries)
    tokens = (start + queries).to(tl.int64)
    out_rows = tokens * NUM_HEADS + heads
    q = load_rows(q_ptr, tokens * stride_qt + heads * stride_qh, is_row, HEAD_DIM, H, True)
    grad = load_rows(grad_ptr, out_rows * HEAD_DIM, is_row, HEAD_DIM, H, True)
    lse = tl.load(lse_ptr + out_rows, mask=is_row, other=0.0)
    inner = tl.load(inner_ptr + out_rows, mask=is_row, other=0.0)
    grad_q = tl.zeros((BLOCK_M, H), tl.float32)
    k_offsets = tl.arange(0, BLOCK_N) * stride_kt
    v_offsets = tl.arange(0, BLOCK_N) * stride_vt
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first + distance - window + 1, 0) // BLOCK_N * BLOCK_N
    for n in range(begin, tl.minimum(first + distance + TILE_QUERIES, seq_len), BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        is_key = keys < seq_len
        token = tl.cast(key_start + n, tl.int64)
        k = load_rows(k_ptr + token * stride_kt + kv_head * stride_kh, k_offsets, is_key, HEAD_DIM, H, True)
        v = load_rows(v_ptr + token * stride_vt + kv_head * stride_vh, v_offsets, is_key, HEAD_DIM, H, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        visible = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        weights = tl.where(visible, tl.exp2(scores * scale_log2 - lse[:, None]), 0.0)
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - inner[:, None])
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)

    columns = tl.arange(0, H)
    tl.store(
        grad_q_ptr + (out_rows * HEAD_DIM)[:, None] + columns[None, :],
        (grad_q * scale).to(grad_q_ptr.dtype.element_ty),
        mask=is_row[:, None] & (columns[None, :] < HEAD_DIM),
    )
