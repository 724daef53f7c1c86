"""Attention over runs of queries and keys, forward and backward, in plain torch for any device.

Products and sums are in float32, in a fixed order. T queries, L keys, N heads, K kv heads, G = N / K, H head_dim, R
rows of a tile.

Pure; the reference and the deterministic kernels share it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.model.kernels.runs import AttentionRuns

ROWS = 256
"""Queries of one tile: their scores are made as a whole."""
LOWEST = -1e30
"""The logarithm of the sum of a query that sees no key: below every other, yet finite."""


def attend_runs(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKH: Tensor,
    runs: AttentionRuns,
    scale: float,
    window: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return out_TNH in `dtype` and lse_TN (natural logarithm, float32), as `Ops.attend_runs`."""
    out_TNH = torch.zeros(q_TNH.shape, dtype=dtype, device=q_TNH.device)
    lse_TN = torch.full(q_TNH.shape[:2], LOWEST, dtype=torch.float32, device=q_TNH.device)
    for rows, keys, hidden_RL in tiles(runs, window, q_TNH.device):
        scores_KGRL = products(q_TNH[rows], k_LKH[keys]).mul_(scale).masked_fill_(hidden_RL, float("-inf"))
        lse_KGR1 = scores_KGRL.logsumexp(-1, keepdim=True).clamp_(min=LOWEST)
        weights_KGRL = torch.exp(scores_KGRL - lse_KGR1)
        out_TNH[rows] = rows_first(weights_KGRL @ values(v_LKH[keys])).to(dtype)
        lse_TN[rows] = rows_first(lse_KGR1).squeeze(-1)
    return out_TNH, lse_TN


def attend_runs_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKH: Tensor,
    out_TNH: Tensor,
    lse_TN: Tensor,
    runs: AttentionRuns,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_TNH, k_LKH and v_LKH in float32, as `Ops.attend_runs_backward`."""
    grads = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_TNH, k_LKH, v_LKH))
    grad_q, grad_k, grad_v = grads
    num_kv_heads = k_LKH.shape[1]
    inner_TN1 = (grad_TNH.float() * out_TNH.float()).sum(-1, keepdim=True)
    for rows, keys, hidden_RL in tiles(runs, window, q_TNH.device):
        scores_KGRL = products(q_TNH[rows], k_LKH[keys]).mul_(scale).masked_fill_(hidden_RL, float("-inf"))
        weights_KGRL = torch.exp(scores_KGRL - heads_first(lse_TN[rows].unsqueeze(-1), num_kv_heads))
        inner_KGR1 = heads_first(inner_TN1[rows], num_kv_heads)
        grad_s_KGRL = weights_KGRL * (products(grad_TNH[rows], v_LKH[keys]) - inner_KGR1) * scale
        grad_q[rows] += rows_first(grad_s_KGRL @ values(k_LKH[keys]))
        q_KGRH, grad_KGRH = (heads_first(x[rows].float(), num_kv_heads) for x in (q_TNH, grad_TNH))
        grad_k[keys] += (grad_s_KGRL.transpose(-1, -2) @ q_KGRH).sum(1).transpose(0, 1)
        grad_v[keys] += (weights_KGRL.transpose(-1, -2) @ grad_KGRH).sum(1).transpose(0, 1)
    return grad_q, grad_k, grad_v


def tiles(runs: AttentionRuns, window: int | None, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield tiles of queries, the keys that some of them see, and which pairs are hidden, bool [R, L]."""
    for queries, keys, distance in runs.slices():
        for first in range(queries.start, queries.stop, ROWS):
            rows = slice(first, min(first + ROWS, queries.stop))
            places = range(distance + rows.start - queries.start, distance + rows.stop - queries.start)
            begin = 0 if window is None else max(0, places.start - window + 1)
            end = min(keys.stop - keys.start, places.stop)
            if begin >= end:
                continue
            away_RL = torch.arange(places.start, places.stop, device=device)[:, None] - torch.arange(
                begin, end, device=device
            )
            hidden_RL = away_RL < 0 if window is None else (away_RL < 0) | (away_RL >= window)
            yield rows, slice(keys.start + begin, keys.start + end), hidden_RL


def products(q_RNH: Tensor, k_LKH: Tensor) -> Tensor:
    """Return each query head's products with the keys of its kv head, float32 [K, G, R, L]."""
    keys_K1HL = k_LKH.float().permute(1, 2, 0).unsqueeze(1)
    return heads_first(q_RNH.float(), k_LKH.shape[1]) @ keys_K1HL


def values(v_LKH: Tensor) -> Tensor:
    """Return v_K1LH in float32."""
    return v_LKH.float().transpose(0, 1).unsqueeze(1)


def heads_first(x_RNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return x_KGRH."""
    return x_RNH.reshape(x_RNH.shape[0], num_kv_heads, -1, x_RNH.shape[2]).permute(1, 2, 0, 3)


def rows_first(x_KGRH: Tensor) -> Tensor:
    """Return x_RNH, the inverse of `heads_first`."""
    return x_KGRH.permute(2, 0, 1, 3).flatten(1, 2)
