"""The destination of a weight's gradient: the seam between a parameter's owner and the kernels.

The trainer owns the memory that gradients travel from. It names a buffer for each parameter, and the kernels whose
backward computes a weight's gradient write it there, so that nothing is copied. Kernels without such a backward ignore
it: autograd then gives the gradient in memory of its own, and the owner must copy.

Set by the trainer's ZeRO buckets; read by the fused products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GradDestination = Callable[[], Tensor | None]
"""Called once per backward: a buffer of the weight's shape and dtype, or None where the gradient may lie anywhere."""


def set_grad_destination(parameter: Tensor, destination: GradDestination) -> None:
    """Name the buffer of each later gradient of `parameter`. It holds `destination` for as long as it lives."""
    parameter.grad_destination = destination  # type: ignore[attr-defined]  # read below alone


def grad_destination(weight: Tensor) -> GradDestination | None:
    """Return what the owner of a weight has set, or None."""
    destination: GradDestination | None = getattr(weight, "grad_destination", None)
    return destination


def weight_gradient(grad_TE: Tensor, x_TD: Tensor, destination: GradDestination | None) -> Tensor:
    """Return grad^T @ x, in the destination's buffer where it has one.

    Autograd keeps that very tensor without a copy.
    """
    buffer = None if destination is None else destination()
    return grad_TE.t() @ x_TD if buffer is None else torch.mm(grad_TE.t(), x_TD, out=buffer)
