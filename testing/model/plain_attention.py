"""A plain attention that stands in for flash-attn-4."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


class PlainVarlen:
    """Attends by the plain formula in float64, and counts its calls (`VarlenAttention`)."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        query_start: Tensor,
        key_start: Tensor,
        longest: tuple[int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        self.calls += 1
        queries, keys = (list(itertools.pairwise(start.tolist())) for start in (query_start, key_start))
        assert (queries[-1][1], keys[-1][1]) == (len(q_TNH), len(k_LKH))
        assert longest == tuple(max(end - begin for begin, end in bounds) for bounds in (queries, keys))
        parts = [
            attend_one(q_TNH[slice(*query)], k_LKH[slice(*key)], v_LKH[slice(*key)], scale, window)
            for query, key in zip(queries, keys, strict=True)
        ]
        return torch.cat(parts).to(q_TNH.dtype)


def attend_one(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend for one sequence, whose queries are its last positions."""
    group, num_keys = q_TNH.shape[1] // k_LKH.shape[1], len(k_LKH)
    k_LNH, v_LNH = (x.double().repeat_interleave(group, 1) for x in (k_LKH, v_LKH))
    scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH.double(), k_LNH) * scale
    places = torch.arange(num_keys, device=q_TNH.device)
    distance = places[num_keys - len(q_TNH) :, None] - places
    hidden = (distance < 0) | (distance >= (window or num_keys))
    return torch.einsum("ntl,lnh->tnh", scores_NTL.masked_fill(hidden, float("-inf")).softmax(-1), v_LNH)
