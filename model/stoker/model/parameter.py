"""The parts table: which rows of which parameter hold which Hugging Face tensor.

A fused parameter (qkv, gate_up) declares its parts, a parallel layer the dim it shards. One table serves loading and
saving of Hugging Face folders, the trainer's checkpoint and the engine.

Declared by the layers, read by loaders, saves and the initial weights. Never changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Rows `[row_start, row_end)` of `parameter` are the box `start`, `size` of the global tensor `hf_name`."""

    hf_name: str
    """Name in a Hugging Face file: unfused, tied weights once."""
    parameter_name: str
    """Name in `Decoder.named_parameters()`."""
    parameter: nn.Parameter
    row_start: int
    row_end: int
    global_shape: tuple[int, ...]
    """Shape of the whole tensor over all tensor-parallel ranks."""
    start: tuple[int, ...]
    """First index of this rank's rows in the whole tensor, by dim."""
    shard_dim: int | None
    """Dim of the whole tensor that is cut over the tensor-parallel group; None: every rank holds all of it
    (replicated).
    """
    is_copy: bool = False
    """Another slice of the model holds the original: load it, but do not save it, nor count it in a norm."""
    is_adapter: bool = False
    """It is trained beside a frozen weight, and no tensor of a Hugging Face folder."""

    @property
    def size(self) -> tuple[int, ...]:
        """Extent of this rank's box."""
        return (self.row_end - self.row_start, *self.parameter.shape[1:])

    @property
    def flat_start(self) -> int:
        """First element of the part within the flattened parameter; a part is one contiguous run of `num_elements`."""
        return self.row_start * math.prod(self.parameter.shape[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    @property
    def decays(self) -> bool:
        """Whether weight decay usually applies: matrices yes, norms and biases no."""
        return len(self.global_shape) > 1

    def local(self) -> Tensor:
        """This rank's rows as a view without gradient: writing to it changes the parameter."""
        return self.parameter.detach()[self.row_start : self.row_end]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's box of the whole tensor, as a view."""
        return whole[tuple(slice(begin, begin + extent) for begin, extent in zip(self.start, self.size, strict=True))]


@dataclass(frozen=True)
class Section:
    """One Hugging Face tensor inside a layer's fused parameter, before sharding."""

    hf_name: str
    rows: int
    """Rows of the whole tensor."""
    copies: int = 1
    """Neighbouring ranks that hold the same rows; above 1 there is no gradient."""
