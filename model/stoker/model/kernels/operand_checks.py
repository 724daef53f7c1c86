"""Checks of operands, each for one operation or several. They raise ValueError with the shapes that do not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.expert_rows import ExpertRows
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.runs import AttentionRuns
from stoker.model.kernels.sampling import SampleRows


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


def check_route(logits_TE: Tensor, num_choices: int) -> None:
    if logits_TE.dtype is not torch.float32 or not 1 <= num_choices <= logits_TE.shape[-1]:
        raise ValueError(
            f"route: {num_choices} experts out of logits {tuple(logits_TE.shape)} of {logits_TE.dtype}; the logits "
            "must be float32, and no more experts be chosen than there are"
        )


def check_grouped_linear(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> None:
    if x_SD.shape[-1] != weight_RD.shape[-1] or weight_RD.shape[0] % len(ends_E):
        raise ValueError(
            f"grouped_linear: weight {tuple(weight_RD.shape)} does not fit x {tuple(x_SD.shape)} and "
            f"{len(ends_E)} experts"
        )


def check_combine(y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> None:
    if y_SD.shape[0] != len(rows.sources) or weights_TK.shape[1] != rows.num_choices:
        raise ValueError(
            f"combine: y {tuple(y_SD.shape)}, weights {tuple(weights_TK.shape)} and {len(rows.sources)} rows do not fit"
        )


def check_experts(x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> None:
    experts, own, hidden, width = weights.num_experts, weights.num_own, weights.hidden, weights.width
    shapes = (tuple(weights.gate_up.shape), tuple(weights.down.shape))
    if x_TD.shape[-1] != hidden or shapes != ((own * 2 * width, hidden), (own * hidden, width)):
        raise ValueError(
            f"experts: x {tuple(x_TD.shape)}, router {tuple(weights.router.shape)}, gate and up {shapes[0]} and down "
            f"{shapes[1]} do not fit"
        )
    if not 1 <= weights.num_choices <= experts:
        raise ValueError(f"experts: {weights.num_choices} experts of a token, of {experts}")
    if weights.first < 0 or weights.first + own > experts:
        raise ValueError(f"experts: {own} experts from {weights.first} on, of {experts}")
    if slots_T is not None and (slots_T.shape != x_TD.shape[:1] or slots_T.dtype is not torch.int32):
        raise ValueError(
            f"experts: slots {tuple(slots_T.shape)} {slots_T.dtype}, int32 {tuple(x_TD.shape[:1])} is needed"
        )


def check_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    if hidden_TD.shape[-1] != weight_VD.shape[-1] or not hidden_TD.shape[:1] == targets_T.shape == weights_T.shape:
        raise ValueError(
            f"cross_entropy: hidden {tuple(hidden_TD.shape)}, weight {tuple(weight_VD.shape)}, targets "
            f"{tuple(targets_T.shape)} and weights {tuple(weights_T.shape)} do not fit"
        )


def check_sample(logits_BV: Tensor, rows: SampleRows) -> None:
    if rows.seats.shape != logits_BV.shape[:1] or rows.positions.shape != logits_BV.shape[:1]:
        raise ValueError(
            f"sample: logits {tuple(logits_BV.shape)}, seats {tuple(rows.seats.shape)} and positions "
            f"{tuple(rows.positions.shape)} do not fit"
        )


def check_rotate(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> None:
    cos_shape = rotation.cos.shape
    if cos_shape != (q_TNH.shape[0], 1, q_TNH.shape[2]) or q_TNH.shape[::2] != k_TKH.shape[::2]:
        raise ValueError(
            f"rotate: q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)} and cos {tuple(cos_shape)} do not fit"
        )


def check_cache_write(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer) -> None:
    check_attention(q_TNH, k_TKH, v_TKH)
    cos_shape, cache_shape = rotation.cos.shape, into.cache.shape
    if cache_shape[-2:] != k_TKH.shape[1:] or cos_shape != (q_TNH.shape[0], 1, q_TNH.shape[2]):
        raise ValueError(
            f"rotate_and_write: q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)}, cos {tuple(cos_shape)} "
            f"and cache {tuple(cache_shape)} do not fit"
        )


def check_adam(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, parameters: Tensor | None) -> None:
    sizes = {len(tensor) for tensor in (master, grad, exp_avg, exp_avg_sq)}
    if len(sizes) > 1 or (parameters is not None and parameters.shape != master.shape):
        raise ValueError(
            f"adam_: buffers of {sorted(sizes)} elements and parameters "
            f"{None if parameters is None else tuple(parameters.shape)} do not fit"
        )
