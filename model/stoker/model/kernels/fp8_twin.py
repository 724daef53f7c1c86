"""Casts to eight bits in plain torch, and products of them in float32: the twin of `fused/fp8`, for any device.

R rows, C columns, E output size, D input size.
"""

from __future__ import annotations

import sys
from typing import cast as typed

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.model.kernels import fp8_linear as layer
from stoker.model.kernels.fp8 import LARGEST, MULTIPLE, SMALLEST_AMAX, Axis, Fp8Tensor, Fp8Weight


def fp8_linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, fp8: Fp8Weight, keeps_casts: bool) -> Tensor:
    kernels = typed("layer.Fp8Kernels", sys.modules[__name__])
    return layer.fp8_linear(kernels, x_TD, weight_ED, bias_E, fp8, keeps_casts)


def amax(x_RC: Tensor, axis: Axis) -> Tensor:
    magnitudes = x_RC.detach().float().abs()
    if axis == "tensor":
        return magnitudes.max().view(1) if magnitudes.numel() else magnitudes.new_zeros(1)
    dim = 1 if axis == "rows" else 0
    return magnitudes.amax(dim) if magnitudes.shape[dim] else magnitudes.new_zeros(magnitudes.shape[1 - dim])


def cast(x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None) -> Fp8Tensor:
    amax = amax.clamp(min=SMALLEST_AMAX)
    largest = torch.full_like(amax, LARGEST[dtype])  # with a number torch would multiply by an inverse
    factor = largest / amax
    values = x_RC.detach().float() * (factor if axis == "tensor" else factor[:, None])
    return put(Fp8Tensor(values.to(dtype), amax / largest), into)


def cast_transposed(x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None) -> Fp8Tensor:
    padded = F.pad(x_RC.detach().t(), (0, -x_RC.shape[0] % MULTIPLE))
    return cast(padded, amax, dtype, "tensor" if axis == "tensor" else "rows", into)


def cast_both(
    x_RC: Tensor, amax: Tensor, dtype: torch.dtype, into: tuple[Fp8Tensor, Fp8Tensor] | None
) -> tuple[Fp8Tensor, Fp8Tensor]:
    first, second = into or (None, None)
    return cast(x_RC, amax, dtype, "tensor", first), cast_transposed(x_RC, amax, dtype, "tensor", second)


def put(made: Fp8Tensor, into: Fp8Tensor | None) -> Fp8Tensor:
    if into is None:
        return made
    into.values.view(torch.uint8).copy_(made.values.contiguous().view(torch.uint8))
    into.scale.copy_(made.scale)
    return into


def product(a_nd: Fp8Tensor, b_ed: Fp8Tensor, dtype: torch.dtype, fast: bool, out: Tensor | None) -> Tensor:  # noqa: ARG001
    sums_ne = F.linear(a_nd.values.float(), b_ed.values.float())
    scaled = sums_ne * a_nd.scale.view(-1, 1) * b_ed.scale
    return scaled.to(dtype) if out is None else out.copy_(scaled)
