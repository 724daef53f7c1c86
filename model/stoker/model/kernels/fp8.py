"""Weights whose products are computed in eight bits: what their owner sets, and their copies in eight bits.

A tensor in eight bits has a scale, what its value 1 stands for. `Tensorwise` gives one scale to a tensor, `Rowwise` one
to each row or column that a product does not sum over (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
Scales follow from the tensor itself, so nothing of them is kept between steps. E output size, D input size.

Set by the trainer on the weights that it chooses; read by `Ops.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Recipe = Literal["Tensorwise", "Rowwise"]
Cut = Literal["rows", "columns"]
Axis = Literal["tensor", "rows", "columns"]
"""What has one scale: the whole matrix, each row, or each column."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST_AMAX = 1e-12
"""Largest magnitudes below it count as this one: the inverse of a scale stays finite."""
GRADIENT_DTYPES: dict[Recipe, torch.dtype] = {"Tensorwise": torch.float8_e5m2, "Rowwise": torch.float8_e4m3fn}
"""One scale for a whole gradient needs the wider range; scales by row leave room for the third bit of the mantissa."""
MULTIPLE = 16
"""Sizes that a product sums over, and its columns, are multiples of it."""


class Fp8Tensor(NamedTuple):
    """A matrix in eight bits."""

    values: Tensor
    scale: Tensor
    """float32: [1], or one for each row."""


@dataclass(frozen=True)
class WeightCopies:
    """A weight in eight bits, in the two orders in which products read it."""

    plain: Fp8Tensor
    """[E, D], for forward."""
    transposed: Fp8Tensor
    """[D, E], for backward."""


class Fp8Weight:
    """How the products of one weight are computed, and its copies while they are valid."""

    def __init__(self, recipe: Recipe, group: ProcessGroup | None = None, cut: Cut | None = None) -> None:
        """`group`: the ranks that share the weight; `cut`: the dim that is cut over them."""
        self.recipe: Recipe = recipe
        self.group = group
        self.cut = cut
        self.amax: dict[Axis, Tensor] = {}
        """Largest magnitudes of the weight's values; agreed over the group."""
        self.copies: WeightCopies | None = None
        self.memory: WeightCopies | None = None
        """Where the next copies are written."""

    @property
    def input_cut(self) -> Cut | None:
        """The dim of x_TD that is cut over the group."""
        return "columns" if self.cut == "columns" else None

    @property
    def gradient_cut(self) -> Cut | None:
        """The dim of y_TE, and of its gradient, that is cut over the group."""
        return "columns" if self.cut == "rows" else None

    def renew(self) -> None:
        """Forget what was made of the weight's values: they have changed."""
        self.amax = {}
        self.copies = None

    def release(self) -> None:
        """Give the memory of the copies back; the next use makes them again, with the same scales."""
        self.copies = self.memory = None

    def agree(self, amax: Tensor, axis: Axis, cut: Cut | None) -> Tensor:
        """Make the largest magnitudes those of the whole matrix, of which each rank of the group has a part."""
        is_partial = cut is not None and (axis == "tensor" or axis != cut)
        if is_partial and self.group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax


def mark_product(y_TE: Tensor) -> None:
    """Mark the result of a product in eight bits.

    Another such product usually follows, so the kernel between them notes the largest magnitude of what it makes.
    """
    y_TE.is_fp8_product = True  # type: ignore[attr-defined]  # read below alone


def is_product(y_TE: Tensor | None) -> bool:
    """Whether a product in eight bits made this tensor."""
    return getattr(y_TE, "is_fp8_product", False)


def note_amax(x: Tensor, parts: Tensor) -> None:
    """Note the largest magnitudes of parts of a tensor, float32, for the cast that follows."""
    x.fp8_amax = parts, x._version  # type: ignore[attr-defined]  # read below alone


def noted_amax(x: Tensor) -> Tensor | None:
    """Return what was noted; None where nothing was, or the values have changed since."""
    parts, version = getattr(x, "fp8_amax", (None, -1))
    return parts if version == x._version else None


def set_fp8(parameter: Tensor, fp8: Fp8Weight) -> None:
    """Let the products of `parameter` be computed in eight bits. It holds `fp8` for as long as it lives."""
    parameter.fp8 = fp8  # type: ignore[attr-defined]  # read below alone


def fp8_of(weight: Tensor) -> Fp8Weight | None:
    """Return what the owner of a weight has set, or None."""
    found: Fp8Weight | None = getattr(weight, "fp8", None)
    return found
