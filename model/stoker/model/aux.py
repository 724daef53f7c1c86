"""By-products of a forward pass: router losses and hidden states, named tensors per layer.

One object per micro-batch, passed explicitly.

Filled by the blocks of one forward pass; owned by the caller of `Decoder.forward`.
"""

from __future__ import annotations

from torch import Tensor


class Aux:
    """Named tensors per layer. Keeps the first value of a name, so that a recomputed block changes nothing."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], Tensor] = {}

    def put(self, layer: int, name: str, tensor: Tensor) -> None:
        self.values.setdefault((layer, name), tensor)

    def named(self, name: str) -> list[Tensor]:
        """The tensors of one name in layer order."""
        return [self.values[key] for key in sorted(self.values) if key[1] == name]
