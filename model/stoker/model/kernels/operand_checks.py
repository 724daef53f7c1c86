"""Checks of operands that several operations share. They raise ValueError with the shapes that do not fit."""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.runs import AttentionRuns


def check_norm_linear(x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, weight_ED: Tensor) -> None:
    does_update_fit = update_TD is None or update_TD.shape == x_TD.shape
    if not does_update_fit or not x_TD.shape[-1:] == norm_D.shape == weight_ED.shape[-1:]:
        raise ValueError(
            f"norm_linear: x {tuple(x_TD.shape)}, update {None if update_TD is None else tuple(update_TD.shape)}, norm "
            f"{tuple(norm_D.shape)} and weight {tuple(weight_ED.shape)} do not fit"
        )


def check_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    if k_TKH.shape != v_TKH.shape or q_TNH.shape[::2] != k_TKH.shape[::2] or q_TNH.shape[1] % k_TKH.shape[1]:
        raise ValueError(
            f"attention: q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)} and v {tuple(v_TKH.shape)} do not fit"
        )


def check_runs(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, runs: AttentionRuns) -> None:
    heads_fit = k_LKH.shape == v_LKH.shape and q_TNH.shape[2] == k_LKH.shape[2] and not q_TNH.shape[1] % k_LKH.shape[1]
    if not heads_fit or (q_TNH.shape[0], k_LKH.shape[0]) != (runs.num_queries, runs.num_keys):
        raise ValueError(
            f"attend_runs: q {tuple(q_TNH.shape)}, k {tuple(k_LKH.shape)} and v {tuple(v_LKH.shape)} do not fit "
            f"{runs.num_queries} queries and {runs.num_keys} keys"
        )
