"""The operations in plain torch, for any device: what every other kernel is tested against, and what the CPU runs.

T tokens, D input size, E output size, N heads, K kv heads, G = N / K, H head_dim, F ffn, V vocab, L keys, S sequences.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import composed, cpu_product, draw, expert_rows, fp8_twin, grouped_product, run_attention
from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.cross_entropy import chunked_cross_entropy
from stoker.model.kernels.expert_rows import ExpertRows, Routes
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PackedGroup, PackedSequences, PagedSequences

MAX_PRODUCT_KEYS = 1024
"""Longest sequence whose scores are made as a whole."""

linear = cpu_product.linear
fp8_linear = fp8_twin.fp8_linear
norm_linear = composed.norm_linear
norm_linear_swiglu = composed.norm_linear_swiglu
linear_swiglu = composed.linear_swiglu
experts = composed.experts
norm_experts = composed.norm_experts
prepare_blocks = composed.prepare_blocks
pack = cpu_product.pack
sample = draw.sample
dispatch = expert_rows.gather_rows
attend_runs = run_attention.attend_runs
attend_runs_backward = run_attention.attend_runs_backward


def embedding(tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
    return F.embedding(tokens_T, weight_VD)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x_TD + residual_TD
    return rms_norm(total, weight_D, eps), total


def swiglu(gate_up_TF: Tensor) -> Tensor:
    gate, up = gate_up_TF.chunk(2, -1)
    return F.silu(gate) * up


def route(logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes:
    weights_TK, experts_TK = torch.topk(torch.softmax(logits_TE, -1), num_choices, -1)
    return Routes(weights_TK / weights_TK.sum(-1, keepdim=True) if normalise else weights_TK, experts_TK)


def grouped_linear(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
    product = cpu_product.product
    return grouped_product.grouped_linear(x_SD, weight_RD, ends_E, product, product)


def combine(y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    return (expert_rows.gather_choices(y_SD, rows) * weights_TK.unsqueeze(-1)).sum(1).to(y_SD.dtype)


def rotate(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    cos_T1H, sin_T1H, q_norm_H, k_norm_H, eps = rotation
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, q_norm_H, eps), rms_norm(k_TKH, k_norm_H, eps)
    if not torch.is_grad_enabled() and are_neighbours(q_TNH, k_TKH):
        both = q_TNH.as_strided((q_TNH.shape[0], q_TNH.shape[1] + k_TKH.shape[1], q_TNH.shape[2]), q_TNH.stride())
        rotated = rotate_pairs(both, cos_T1H, sin_T1H)
        return rotated[:, : q_TNH.shape[1]], rotated[:, q_TNH.shape[1] :]
    return rotate_pairs(q_TNH, cos_T1H, sin_T1H), rotate_pairs(k_TKH, cos_T1H, sin_T1H)


def are_neighbours(q_TNH: Tensor, k_TKH: Tensor) -> bool:
    """Whether q and k lie next to each other in one product's output, so that one pass rotates both."""
    return (
        q_TNH.stride() == k_TKH.stride()
        and q_TNH.stride(1) == q_TNH.shape[2]
        and k_TKH.data_ptr() - q_TNH.data_ptr() == q_TNH.shape[1] * q_TNH.stride(1) * q_TNH.element_size()
    )


def rotate_pairs(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotate pairs of elements i and i + H/2; the table's sine carries the sign."""
    wide = x_TNH.float()
    return torch.addcmul(wide * cos_T1H, wide.roll(wide.shape[-1] // 2, -1), sin_T1H).to(x_TNH.dtype)


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None,
    _attention: str = "sdpa",
) -> Tensor:
    padded = sequences.padded
    if padded.places is None:
        return attend_packed_group(q_TNH, k_TKH, v_TKH, padded.groups[0], scale, window)
    outputs = []
    for group in padded.groups:
        assert group.token_rows is not None
        q, k, v = (x.index_select(0, group.token_rows) for x in (q_TNH, k_TKH, v_TKH))
        outputs.append(attend_packed_group(q, k, v, group, scale, window))
    return torch.cat(outputs).index_select(0, padded.places)


def attend_packed_group(
    q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor, group: PackedGroup, scale: float, window: int | None
) -> Tensor:
    """Attend within groups of padded sequences, P places each.

    Padding lies behind a sequence's end, so causal order hides it, and its own results are dropped.
    """
    q, k, v = (x.reshape(group.num_sequences, group.padded_len, *x.shape[1:]) for x in (q_PNH, k_PKH, v_PKH))
    return attend_causally(q, k, v, group.masks, scale, window).flatten(0, 1)


def attend_causally(
    q_STNH: Tensor, k_SLKH: Tensor, v_SLKH: Tensor, masks: dict[int | None, Tensor], scale: float, window: int | None
) -> Tensor:
    """Attend causally for S sequences of L keys whose last T positions are the queries: out_STNH.

    `masks` keeps what is made here for the next layer.
    """
    num_queries, num_keys = q_STNH.shape[1], k_SLKH.shape[1]
    is_plain = window is None and num_queries == num_keys
    by_products = prefers_products(q_STNH, num_keys)
    if window not in masks and (by_products or not is_plain):
        seen = causal_mask(num_queries, num_keys, window, q_STNH.device)
        masks[window] = torch.zeros(seen.shape, dtype=q_STNH.dtype, device=seen.device).masked_fill_(
            ~seen, float("-inf")
        )
    if by_products:
        return attend_by_products(q_STNH, k_SLKH, v_SLKH, masks[window], scale)
    mask = None if is_plain else masks[window]
    q, k, v = (x.transpose(1, 2) for x in (q_STNH, k_SLKH, v_SLKH))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_plain, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)


def prefers_products(q_STNH: Tensor, num_keys: int) -> bool:
    """torch's flash attention for the CPU is 2 to 6 times slower in bfloat16 than two plain products, as long as the
    scores fit the cache.
    """
    return q_STNH.device.type == "cpu" and q_STNH.dtype is torch.bfloat16 and num_keys <= MAX_PRODUCT_KEYS


def attend_by_products(q_STNH: Tensor, k_SLKH: Tensor, v_SLKH: Tensor, mask_TL: Tensor, scale: float) -> Tensor:
    """Attend by two products: the G heads of a kv head are rows of one, so keys and values are not copied per head."""
    num_sequences, num_queries, num_heads, head_dim = q_STNH.shape
    num_keys, num_kv_heads = k_SLKH.shape[1:3]
    batch, group = num_sequences * num_kv_heads, num_heads // num_kv_heads
    q = (
        q_STNH.reshape(num_sequences, num_queries, num_kv_heads, group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, group * num_queries, head_dim)
    )
    k = k_SLKH.permute(0, 2, 3, 1).reshape(batch, head_dim, num_keys)
    v = v_SLKH.transpose(1, 2).reshape(batch, num_keys, head_dim)
    weights = torch.baddbmm(mask_TL.repeat(group, 1), q, k, alpha=scale).softmax(-1)
    out = torch.bmm(weights, v).view(num_sequences, num_kv_heads, group, num_queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(q_STNH.shape)


def causal_mask(num_queries: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """bool [num_queries, seq_len]: the queries are the last positions of the sequence."""
    query = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def rotate_and_write(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer) -> Tensor:
    q_TNH, k_TKH = rotate(q_TNH, k_TKH, rotation)
    write_cache(k_TKH, v_TKH, into)
    return q_TNH


def paged_attention(
    q_TNH: Tensor, cache: Tensor, layer: int, sequences: PagedSequences, scale: float, window: int | None
) -> Tensor:
    if len(sequences.decode) == 1 and sequences.decode[0].token_rows is None:
        return attend_group(q_TNH, cache, layer, sequences.decode[0], scale, window)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    for group in sequences.decode:
        assert group.token_rows is not None
        out_TNH.index_copy_(
            0,
            group.token_rows,
            attend_group(q_TNH.index_select(0, group.token_rows), cache, layer, group, scale, window),
        )
    for sequence in sequences.prefill:
        attend_sequence(q_TNH, out_TNH, cache, layer, sequence, scale, window)
    return out_TNH


def attend_sequence(
    q_TNH: Tensor,
    out_TNH: Tensor,
    cache: Tensor,
    layer: int,
    sequence: CachedSequence,
    scale: float,
    window: int | None,
) -> None:
    """Attend for the last tokens of one sequence, into their rows of `out_TNH`."""
    rows = slice(sequence.query_start, sequence.query_end)
    k_LKH, v_LKH = read_cache(cache, layer, sequence)
    out_TNH[rows] = attend_causally(q_TNH[rows][None], k_LKH[None], v_LKH[None], sequence.masks, scale, window)[0]


def write_cache(k_TKH: Tensor, v_TKH: Tensor, into: CacheLayer) -> None:
    cache, layer, sequences = into.cache, into.layer, cast("PagedSequences", into.sequences)  # never the device's
    rows_T = sequences.slot_rows[layer]
    by_token = cache.view(-1, *cache.shape[-2:])
    by_token.index_copy_(0, rows_T[: sequences.num_tokens], k_TKH)
    by_token.index_copy_(0, rows_T[sequences.num_tokens :], v_TKH)


def read_cache(cache: Tensor, layer: int, sequence: CachedSequence) -> tuple[Tensor, Tensor]:
    """Copies of the sequence's keys and values, [seq_len, K, H] each."""
    by_block = cache.view(-1, *cache.shape[-3:])
    both = by_block.index_select(0, sequence.block_rows[layer]).view(2, -1, *cache.shape[-2:])[:, : sequence.seq_len]
    return both[0], both[1]


def attend_group(
    q_SNH: Tensor, cache: Tensor, layer: int, group: DecodeGroup, scale: float, window: int | None
) -> Tensor:
    """Attend for one new token per sequence: the G heads of a kv head are the queries of one small product."""
    num_kv_heads, head_dim = cache.shape[-2:]
    by_block = cache.view(-1, *cache.shape[-3:])
    both = by_block.index_select(0, group.block_rows[layer]).view(
        2, group.num_sequences, group.padded_len, num_kv_heads, head_dim
    )
    q_SKGH = q_SNH.reshape(group.num_sequences, num_kv_heads, -1, head_dim)
    if window not in group.masks:
        group.masks[window] = additive_mask(group, window, cache.dtype)
    mask = group.masks[window].expand(-1, 1, q_SKGH.shape[2], -1)
    out_SKGH = F.scaled_dot_product_attention(
        q_SKGH, both[0].transpose(1, 2), both[1].transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out_SKGH.reshape(q_SNH.shape)


def additive_mask(group: DecodeGroup, window: int | None, dtype: torch.dtype) -> Tensor:
    seen = group.key_distances >= 0
    if window is not None:
        seen &= group.key_distances < window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def log_softmax(logits_TV: Tensor) -> Tensor:
    return torch.log_softmax(logits_TV.float(), -1)


def cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    first_token: int,
    group: ProcessGroup | None,
    most_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return chunked_cross_entropy(
        cpu_product.product,
        sum_rows,
        hidden_TD,
        weight_VD,
        targets_T,
        weights_T,
        first_token,
        group,
        most_rows=most_rows,
    )


def sum_rows(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def line_squares(flat: Tensor, line: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, line), dim=1, dtype=torch.float32)
    return norms.square_()


def sum_of_squares(flat: Tensor) -> Tensor:
    return flat.double().square().sum()


def adam_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameters: Tensor | None,
    rule: AdamStep,
    scale: Tensor | None,
) -> None:
    if scale is not None and not bool(scale.isfinite()):
        return
    grad = grad if scale is None else grad * scale
    for start, end, decay in ((0, rule.decay_end, rule.weight_decay), (rule.decay_end, master.numel(), 0.0)):
        if start < end:
            adam_region([tensor[start:end] for tensor in (master, grad, exp_avg, exp_avg_sq)], rule, decay)
    if parameters is not None:
        parameters.copy_(master)


def adam_region(tensors: list[Tensor], rule: AdamStep, decay: float) -> None:
    """Step elements of one decay, by torch's fused kernel."""
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    master, grad, exp_avg, exp_avg_sq = tensors
    kernel(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(rule.step), device=master.device)],
        lr=rule.learning_rate,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=decay,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
    )


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return linear(hidden_TD, weight_VD, None)
