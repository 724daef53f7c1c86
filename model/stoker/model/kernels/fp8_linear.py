"""The three products of a linear layer in eight bits: y = x W^T, the gradient of x, and the gradient of W.

Every operand is cast along the dim that its product sums over, so x, W and the gradient of y are each cast in two
orders. Forward casts x in both at once and keeps the second for backward, in one byte per value. W is cast once per
step. T tokens, D input size, E output size; R rows and C columns of any matrix.

Called through `Ops`; the casts and the product are those of the chosen kernels (`fp8_twin`, `fused/fp8`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.model.kernels.fp8 import GRADIENT_DTYPES, Axis, Cut, Fp8Tensor, Fp8Weight, WeightCopies, mark_product
from stoker.model.kernels.grad_destination import grad_destination
from stoker.model.kernels.weight_queue import later, now_or_later

FORWARD_DTYPE = torch.float8_e4m3fn
Pair = tuple[Fp8Tensor, Fp8Tensor]


class Fp8Kernels(Protocol):
    """Casts and products of one set of kernels."""

    def amax(self, x_RC: Tensor, axis: Axis) -> Tensor:
        """Return the largest magnitudes in float32: [1], [R] or [C]."""
        ...

    def cast(self, x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None) -> Fp8Tensor:
        """Return the values in their order, one scale for all of them (`tensor`) or for each row (`rows`)."""
        ...

    def cast_transposed(
        self, x_RC: Tensor, amax: Tensor, dtype: torch.dtype, axis: Axis, into: Fp8Tensor | None
    ) -> Fp8Tensor:
        """Return [C, R]: one scale (`tensor`), or one for each column of x (`columns`).

        R is padded with zeros to a multiple of `MULTIPLE`.
        """
        ...

    def cast_both(
        self, x_RC: Tensor, amax: Tensor, dtype: torch.dtype, into: tuple[Fp8Tensor, Fp8Tensor] | None
    ) -> Pair:
        """Return both orders with one scale, from one pass over x."""
        ...

    def product(self, a_nd: Fp8Tensor, b_ed: Fp8Tensor, dtype: torch.dtype, fast: bool, out: Tensor | None) -> Tensor:
        """Return a @ b^T. `fast`: partial sums may have fewer bits than float32."""
        ...


def fp8_linear(
    kernels: Fp8Kernels, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, fp8: Fp8Weight, keeps_casts: bool
) -> Tensor:
    """Return x @ W^T (+ bias), differentiable.

    `keeps_casts`: backward gets x in eight bits; else x itself, which something else keeps or can restore.
    """
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad):
        y_TE: Tensor = Fp8Linear.apply(x_TD, weight_ED, kernels, fp8, keeps_casts)
        mark_product(y_TE)
    else:
        x = Casts(kernels, x_TD, FORWARD_DTYPE, fp8, fp8.input_cut).rows()
        y_TE = kernels.product(x, weight_copies(kernels, weight_ED, fp8).plain, x_TD.dtype, True, None)
    return y_TE if bias_E is None else y_TE + bias_E


class Fp8Linear(torch.autograd.Function):
    """x @ W^T. The gradient of the weight goes to its destination, or is put off where its owner splits backward."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ED: Tensor, kernels: Fp8Kernels, fp8: Fp8Weight, keeps_casts: bool
    ) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        casts = Casts(kernels, x_TD, FORWARD_DTYPE, fp8, fp8.input_cut)
        x, transposed = casts.both() if keeps_casts and needs_weight else (casts.rows(), None)
        ctx.kernels, ctx.fp8, ctx.dtype = kernels, fp8, x_TD.dtype
        ctx.destination, ctx.later = grad_destination(weight_ED), later(weight_ED)
        if transposed is not None:
            ctx.save_for_backward(weight_ED, *transposed)
        elif needs_weight:
            ctx.save_for_backward(weight_ED, x_TD)
        else:
            ctx.save_for_backward(weight_ED)
        ctx.amax = casts.known_for_columns()
        return kernels.product(x, weight_copies(kernels, weight_ED, fp8).plain, x_TD.dtype, True, None)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        weight_ED, *kept = ctx.saved_tensors
        kernels: Fp8Kernels = ctx.kernels
        fp8: Fp8Weight = ctx.fp8
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        casts = Casts(kernels, grad_TE, GRADIENT_DTYPES[fp8.recipe], fp8, fp8.gradient_cut)
        if not needs_weight:
            return input_gradient(ctx, casts.rows(), weight_ED), None, None, None, None
        grad, transposed = casts.both() if needs_x else (None, casts.columns())
        grad_x = None if grad is None else input_gradient(ctx, grad, weight_ED)

        def weight_gradient() -> Tensor:
            x_DT = Fp8Tensor(*kept) if len(kept) == 2 else input_columns(ctx, kept[0])
            buffer = None if ctx.destination is None else ctx.destination()
            return kernels.product(transposed, x_DT, ctx.dtype, False, buffer)

        return grad_x, now_or_later(ctx.later, weight_gradient), None, None, None


def input_gradient(ctx: Any, grad_TE: Fp8Tensor, weight_ED: Tensor) -> Tensor:
    """Return grad @ W."""
    copies = weight_copies(ctx.kernels, weight_ED, ctx.fp8)
    found: Tensor = ctx.kernels.product(grad_TE, copies.transposed, ctx.dtype, False, None)
    return found


def input_columns(ctx: Any, x_TD: Tensor) -> Fp8Tensor:
    """Cast the input of forward again."""
    casts = Casts(ctx.kernels, x_TD, FORWARD_DTYPE, ctx.fp8, ctx.fp8.input_cut)
    casts.known = ctx.amax
    return casts.columns()


class Casts:
    """One matrix in eight bits, for products that sum over its columns (`rows`) or over its rows (`columns`)."""

    def __init__(self, kernels: Fp8Kernels, x_RC: Tensor, dtype: torch.dtype, fp8: Fp8Weight, cut: Cut | None) -> None:
        """`cut`: the dim that is cut over the ranks that share the weight."""
        self._kernels, self._x_RC, self._dtype, self._fp8, self._cut = kernels, x_RC, dtype, fp8, cut
        self._is_tensorwise = fp8.recipe == "Tensorwise"
        self.known: dict[Axis, Tensor] = {}
        """Largest magnitudes that were computed."""

    def rows(self, into: Fp8Tensor | None = None) -> Fp8Tensor:
        """Return [R, C] for a product that sums over columns."""
        axis: Axis = "tensor" if self._is_tensorwise else "rows"
        return self._kernels.cast(self._x_RC, self._amax(axis), self._dtype, axis, into)

    def columns(self, into: Fp8Tensor | None = None) -> Fp8Tensor:
        """Return [C, R] for a product that sums over rows."""
        axis: Axis = "tensor" if self._is_tensorwise else "columns"
        return self._kernels.cast_transposed(self._x_RC, self._amax(axis), self._dtype, axis, into)

    def both(self, into: Pair | None = None) -> Pair:
        """Return `rows` and `columns`, in one pass where they have the same scale."""
        if self._is_tensorwise:
            return self._kernels.cast_both(self._x_RC, self._amax("tensor"), self._dtype, into)
        first, second = into or (None, None)
        return self.rows(first), self.columns(second)

    def known_for_columns(self) -> dict[Axis, Tensor]:
        """Return the magnitudes that `columns` may read again: those of rows would be kept for nothing."""
        return {axis: amax for axis, amax in self.known.items() if axis != "rows"}

    def _amax(self, axis: Axis) -> Tensor:
        if axis not in self.known:
            self.known[axis] = self._fp8.agree(self._kernels.amax(self._x_RC, axis), axis, self._cut)
        return self.known[axis]


@torch.no_grad()
def weight_copies(kernels: Fp8Kernels, weight_ED: Tensor, fp8: Fp8Weight) -> WeightCopies:
    """Return the weight's copies; they are made at the first use after a change of its values."""
    if fp8.copies is None:
        casts = Casts(kernels, weight_ED, FORWARD_DTYPE, fp8, fp8.cut)
        casts.known = fp8.amax
        memory = None if fp8.memory is None else (fp8.memory.plain, fp8.memory.transposed)
        fp8.copies = fp8.memory = WeightCopies(*casts.both(memory))
    return fp8.copies
