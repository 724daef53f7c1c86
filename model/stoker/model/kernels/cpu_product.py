"""Products on the CPU through oneDNN, with and without gradient, on plain and on packed weights.

torch gives float32 products to MKL, which takes twice the time of oneDNN on AMD cores with AVX-512 (and no less on
others); bfloat16 goes to oneDNN anyway. A packed weight is stored in the order in which oneDNN reads it: 1.3 to 2.5
times faster for few rows, the same for many. Where the processor has no instruction for half precision, torch's
products of it take 3 to 25 times those of float32, so they are computed in float32 and rounded once.
T rows, D input size, E output size.

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
WIDENED_ROWS = 4
"""Least rows of a product in half precision that is computed in float32: fewer cost less than widening the weight."""


def product(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ weight^T (+ bias), without gradient. Either may be a transposed view; the weight may be packed."""
    if weight_ED.is_mkldnn or uses_onednn(x_TD):
        y_TE: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, weight_ED, bias_E, "none", [], "")
        return y_TE
    if is_widened(x_TD):
        return widened_product(x_TD, weight_ED, bias_E)
    return F.linear(x_TD, weight_ED, bias_E)


def widened_product(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x @ weight^T (+ bias) of half precision, computed in float32 and rounded once."""
    bias = None if bias_E is None else bias_E.float()
    return product(x_TD.float(), weight_ED.float(), bias).to(x_TD.dtype)


def uses_onednn(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def is_widened(x_TD: Tensor) -> bool:
    """Whether a product with these rows is computed in float32, because this processor only emulates their dtype."""
    if x_TD.device.type != "cpu" or x_TD.shape[0] < WIDENED_ROWS:
        return False
    return not is_native(x_TD.dtype)


def is_native(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this dtype here, not only their emulation."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x @ weight^T (+ bias), differentiable."""
    if not torch.is_grad_enabled() or weight_ED.is_mkldnn:
        return product(x_TD, weight_ED, bias_E)
    if not uses_onednn(x_TD) and not is_widened(x_TD) and later(weight_ED) is None:
        return F.linear(x_TD, weight_ED, bias_E)
    y_TE: Tensor = OneDnnLinear.apply(x_TD, weight_ED)
    return y_TE if bias_E is None else y_TE + bias_E


class OneDnnLinear(torch.autograd.Function):
    """The three products of a layer, each by `product`."""

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
    """Whether oneDNN packs such weights here: float32 ones, and bfloat16 ones with AVX-512 or AVX-NE-CONVERT."""
    packs = torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)  # type: ignore[no-untyped-call]
    return packs and is_native(dtype)
