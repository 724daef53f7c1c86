"""Products on the CPU through oneDNN, with and without gradient, on plain and on packed weights.

torch gives float32 products to MKL, which takes twice the time of oneDNN on AMD cores with AVX-512 (and no less on
others); bfloat16 goes to oneDNN anyway. A packed weight is stored in the order in which oneDNN reads it: 1.3 to 2.5
times faster for few rows, the same for many. T rows, D input size, E output size.

Called by the reference kernels and `cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.model.kernels.weight_queue import later, now_or_later

PACKED_ROWS = 16
"""Rows that packing is planned for; the order it gives serves any number of them."""


def product(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ weight^T (+ bias), without gradient. Either may be a transposed view; the weight may be packed."""
    if weight_ED.is_mkldnn or uses_onednn(x_TD):
        y_TE: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, weight_ED, bias_E, "none", [], "")
        return y_TE
    return F.linear(x_TD, weight_ED, bias_E)


def uses_onednn(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x @ weight^T (+ bias), differentiable."""
    if not torch.is_grad_enabled() or weight_ED.is_mkldnn:
        return product(x_TD, weight_ED, bias_E)
    if not uses_onednn(x_TD) and later(weight_ED) is None:
        return F.linear(x_TD, weight_ED, bias_E)
    y_TE: Tensor = OneDnnLinear.apply(x_TD, weight_ED)
    return y_TE if bias_E is None else y_TE + bias_E


class OneDnnLinear(torch.autograd.Function):
    """The three products of a layer, through oneDNN where it is used."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.later = later(weight_ED)
        return product(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_weight = now_or_later(ctx.later, lambda: product(grad_TE.t(), x_TD.t())) if needs_weight else None
        return product(grad_TE, weight_ED.t()) if needs_x else None, grad_weight


def pack(weight_ED: Tensor) -> Tensor:
    """Return a copy in oneDNN's order, which only `linear` reads; the weight itself where packing does not apply."""
    if weight_ED.device.type != "cpu" or not is_packable(weight_ED.dtype):
        return weight_ED
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach(), PACKED_ROWS)
    return packed


def is_packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs such weights here: bfloat16 ones need AVX-512 or AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    packs_bfloat16 = dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 or packs_bfloat16
