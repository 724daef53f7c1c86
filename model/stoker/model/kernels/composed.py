"""Operations that are several others in a row, for kernels that have no shorter way: `Ops` then calls the others.

Pure; called by the reference and the deterministic kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stoker.model.kernels.block_weights import BlockWeights
from stoker.model.kernels.expert_weights import ExpertWeights


def norm_linear(
    _x_TD: Tensor, _update_TD: Tensor | None, _norm_D: Tensor, _eps: float, _weight_ED: Tensor, _bias_E: Tensor | None
) -> None:
    return None


def norm_linear_swiglu(
    _x_TD: Tensor, _update_TD: Tensor | None, _norm_D: Tensor, _eps: float, _weight_FD: Tensor
) -> None:
    return None


def linear_swiglu(_x_TD: Tensor, _weight_FD: Tensor) -> None:
    return None


def experts(_x_TD: Tensor, _weights: ExpertWeights, _slots_T: Tensor | None = None) -> None:
    return None


def norm_experts(
    _x_TD: Tensor,
    _update_TD: Tensor | None,
    _norm_D: Tensor,
    _eps: float,
    _weights: ExpertWeights,
    _slots_T: Tensor | None = None,
) -> None:
    return None


def prepare_blocks(_weights: Sequence[BlockWeights]) -> None:
    return None
