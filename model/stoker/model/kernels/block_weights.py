"""The weights of a decoder's blocks as one value each, for kernels that compute all blocks in one call.

T tokens, D hidden, N heads, K kv heads, H head_dim, F width. Made by `decoder` once its weights are final, read by
`prepare_blocks` of the kernels.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from stoker.model.kernels.rotation import Rotation
from stoker.model.kernels.sequences import PagedSequences


class BlockWeights(NamedTuple):
    """One dense block on one rank, without adapters."""

    attention_norm: Tensor
    """[D]"""
    qkv: Tensor
    """[(N + 2K) * H, D]"""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[H]"""
    k_norm: Tensor | None
    output: Tensor
    """[D, N * H]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[D]"""
    gate_up: Tensor
    """[2F, D]: the rows of gate, then of up."""
    down: Tensor
    """[D, F]"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    scale: float
    """Of the attention's scores."""
    window: int | None

    @property
    def products(self) -> tuple[Tensor, ...]:
        """The weights of the products."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The norms' weights and the biases that there are."""
        rows = (self.attention_norm, self.qkv_bias, self.q_norm, self.k_norm, self.output_bias, self.mlp_norm)
        return tuple(row for row in rows if row is not None)


class PreparedBlocks(Protocol):
    """All blocks as one call. It keeps the weights, which must not move."""

    def __call__(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        cache: Tensor,
        sequences: PagedSequences,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the residual stream and its update behind the last block, as `Block` does for each.

        New keys and values are written to the cache. None, and nothing is written: there is no such call for
        this pass, so the caller computes block by block.
        """
        ...
