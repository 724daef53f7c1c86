"""Attention over runs of queries and keys by our own kernels: what a rank of a context-parallel group computes.

The kernels count logarithms in base 2, `Ops` in base e. T queries, L keys, N heads, K kv heads, H head_dim.

Called through `Ops` by `context_attend`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.model.kernels.fused.attention.backward import attend_backward
from stoker.model.kernels.fused.attention.forward import LOG2_E, attend_forward
from stoker.model.kernels.runs import AttentionRuns


def attend_runs(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKH: Tensor,
    runs: AttentionRuns,
    scale: float,
    window: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
    out_TNH = attend_forward(
        q_TNH,
        k_LKH,
        v_LKH,
        runs.query_start,
        num_sequences=len(runs.runs),
        scale=scale,
        window=window,
        out_TNH=torch.empty(q_TNH.shape, dtype=dtype, device=q_TNH.device),
        lse_TN=lse_TN,
        runs=runs,
    )
    return out_TNH, lse_TN.mul_(math.log(2))


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
    return attend_backward(
        grad_TNH.contiguous(),
        q_TNH,
        k_LKH,
        v_LKH,
        out_TNH.contiguous(),
        lse_TN * LOG2_E,
        runs.query_start,
        scale,
        window,
        runs=runs,
    )
