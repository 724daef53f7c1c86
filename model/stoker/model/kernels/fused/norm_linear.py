"""Norm, product and SwiGLU of few rows in fewer kernels, and product and SwiGLU of several rows in one: in a decode
step each kernel costs two or three microseconds beside its bytes.

Without gradient only.

T rows, D input size, E output size, F columns of one half.

Called through `Ops`.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.fused.few_rows import MAX_NORM_DEPTH, RowNorm, few_normed_rows, few_rows, suits_rows
from stoker.model.kernels.fused.norm import add_rms_norm, rms_norm, wants_grad
from stoker.model.kernels.fused.several_rows import several_rows, tile_for


def norm_linear(
    x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, weight_ED: Tensor, bias_E: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Compute norm and product in one kernel; None where that is not faster."""
    if not suits(x_TD, update_TD, norm_D, weight_ED) or not fits_norm(x_TD):
        return None
    y_TE, total_TD = few_normed_rows(x_TD, RowNorm(update_TD, norm_D, eps), weight_ED)
    return y_TE if bias_E is None else y_TE + bias_E, total_TD


def norm_linear_swiglu(
    x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, weight_FD: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Compute norm, product and SwiGLU in one kernel, in two where the rows are deep; None where that is not faster."""
    if not suits(x_TD, update_TD, norm_D, weight_FD):
        return None
    if fits_norm(x_TD):
        return few_normed_rows(x_TD, RowNorm(update_TD, norm_D, eps), weight_FD, is_gated=True)
    if update_TD is None:
        return few_rows(rms_norm(x_TD, norm_D, eps), weight_FD, is_gated=True), x_TD
    normed_TD, total_TD = add_rms_norm(update_TD, x_TD, norm_D, eps)
    return few_rows(normed_TD, weight_FD, is_gated=True), total_TD


def linear_swiglu(x_TD: Tensor, weight_FD: Tensor) -> Tensor | None:
    """Compute product and SwiGLU in one kernel; None where that is not faster."""
    if wants_grad(x_TD, weight_FD):
        return None
    if suits_rows(x_TD, weight_FD):
        return few_rows(x_TD, weight_FD, is_gated=True)
    tile = tile_for(x_TD, weight_FD, is_gated=True)
    return None if tile is None else several_rows(x_TD, weight_FD, tile, is_gated=True)


def suits(x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, weight_ED: Tensor) -> bool:
    tensors = (x_TD, norm_D, weight_ED) if update_TD is None else (x_TD, update_TD, norm_D, weight_ED)
    return suits_rows(x_TD, weight_ED) and not wants_grad(*tensors)


def fits_norm(x_TD: Tensor) -> bool:
    return x_TD.shape[1] <= MAX_NORM_DEPTH
