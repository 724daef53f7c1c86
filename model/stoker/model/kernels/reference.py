"""The operations in plain torch, for any device: what every other kernel is tested against, and what the CPU runs.

T tokens, D input size, E output size, N heads, K kv heads, G = N / K, H head_dim, F ffn, V vocab, L keys, S sequences.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import cpu_product
from stoker.model.kernels.cross_entropy import chunked_cross_entropy
from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PackedSequences, PagedSequences

linear = cpu_product.linear
pack = cpu_product.pack


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


def rotate(
    q_TNH: Tensor,
    k_TKH: Tensor,
    cos_T1H: Tensor,
    sin_T1H: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, q_norm_H, eps), rms_norm(k_TKH, k_norm_H, eps)
    if not torch.is_grad_enabled() and are_neighbours(q_TNH, k_TKH):
        both = q_TNH.as_strided((q_TNH.shape[0], q_TNH.shape[1] + k_TKH.shape[1], q_TNH.shape[2]), q_TNH.stride())
        rotated = rotate_pairs(both, cos_T1H, sin_T1H)
        return rotated[:, : q_TNH.shape[1]], rotated[:, q_TNH.shape[1] :]
    return rotate_pairs(q_TNH, cos_T1H, sin_T1H), rotate_pairs(k_TKH, cos_T1H, sin_T1H)


def are_neighbours(q_TNH: Tensor, k_TKH: Tensor) -> bool:
    """q and k lie next to each other in one product's output, so that one pass rotates both."""
    return (
        q_TNH.stride() == k_TKH.stride()
        and q_TNH.stride(1) == q_TNH.shape[2]
        and k_TKH.data_ptr() - q_TNH.data_ptr() == q_TNH.shape[1] * q_TNH.stride(1) * q_TNH.element_size()
    )


def rotate_pairs(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Element i and i + H/2 are a pair; the table's sine carries the sign."""
    wide = x_TNH.float()
    return torch.addcmul(wide * cos_T1H, wide.roll(wide.shape[-1] // 2, -1), sin_T1H).to(x_TNH.dtype)


def packed_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    bounds = sequences.bounds
    outputs = []
    for begin, end in itertools.pairwise(bounds):
        mask = None if window is None else causal_mask(end - begin, end - begin, window, q_TNH.device)
        outputs.append(attend_one(q_TNH[begin:end], k_TKH[begin:end], v_TKH[begin:end], mask, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_one(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, mask_TL: Tensor | None, scale: float) -> Tensor:
    """One sequence; kv heads are the batch dim and each serves its G heads without a copy. No mask: causal, with as many keys as queries."""
    num_kv_heads, group = k_LKH.shape[1], q_TNH.shape[1] // k_LKH.shape[1]
    q_KGTH = q_TNH.reshape(-1, num_kv_heads, group, q_TNH.shape[2]).permute(1, 2, 0, 3)
    k_KGLH = k_LKH.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    v_KGLH = v_LKH.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out_KGTH = F.scaled_dot_product_attention(
        q_KGTH, k_KGLH, v_KGLH, attn_mask=mask_TL, is_causal=mask_TL is None, scale=scale
    )
    return out_KGTH.permute(2, 0, 1, 3).flatten(1, 2)


def causal_mask(num_queries: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """bool [num_queries, seq_len]: the queries are the last positions of the sequence."""
    query = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def paged_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cache: Tensor,
    layer: int,
    sequences: PagedSequences,
    scale: float,
    window: int | None,
) -> Tensor:
    write_cache(k_TKH, v_TKH, cache, layer, sequences)
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
        rows = slice(sequence.query_start, sequence.query_end)
        if window not in sequence.masks:
            sequence.masks[window] = causal_mask(
                sequence.query_end - sequence.query_start, sequence.seq_len, window, q_TNH.device
            )
        k_LKH, v_LKH = read_cache(cache, layer, sequence)
        out_TNH[rows] = attend_one(q_TNH[rows], k_LKH, v_LKH, sequence.masks[window], scale)
    return out_TNH


def write_cache(k_TKH: Tensor, v_TKH: Tensor, cache: Tensor, layer: int, sequences: PagedSequences) -> None:
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
    """One new token per sequence: the G heads of a kv head are the queries of one small product."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    return chunked_cross_entropy(
        cpu_product.product, sum_rows, hidden_TD, weight_VD, targets_T, weights_T, first_token, group
    )


def sum_rows(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
