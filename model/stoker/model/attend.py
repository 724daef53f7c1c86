"""Attention as the model sees it: one call per layer. The caller decides who keeps keys and values, and where.

T tokens, N heads, K kv heads, H head_dim. With tensor parallelism N and K count this rank's heads.

Called by `block` once per layer; the trainer passes `PackedAttend`, the engine `paged_attend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stoker.model.kernels.block_weights import PreparedBlocks
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import Rotation
from stoker.model.kernels.sequences import pack_sequences
from stoker.model.rotary import RotaryTable


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer, built at each call from the block's current parameters."""

    layer: int
    """Index in the whole model, also within a pipeline stage."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    rope: RotaryTable
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    q_norm: Tensor | None = None
    """[H]: weight of the norm over each head of q, or None."""
    k_norm: Tensor | None = None


class Attend(Protocol):
    """Attention over packed tokens.

    Normalises and rotates q and k according to `spec`; may store k and v. The model never sees a cache.
    """

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        """Return the result of attention, out_TNH."""
        ...

    @property
    def slots(self) -> Tensor | None:
        """int32 [T], below 0 for rows that are padding; None: no row is."""
        ...


class CachedAttend(Attend, Protocol):
    """An engine's attention: keys and values stay in a cache."""

    def all_blocks(
        self, blocks: PreparedBlocks, rope: RotaryTable, x_TD: Tensor, update_TD: Tensor | None, positions_T: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Compute all blocks in one call, with this attention; None where they cannot be for this pass."""
        ...


class RotaryRows:
    """The table's rows for the positions of one pass, looked up once for all layers."""

    def __init__(self) -> None:
        self.key: tuple[RotaryTable, Tensor] | None = None
        self.rows: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Drop the rows: the positions' buffer holds other numbers now."""
        self.key = self.rows = None

    def of(self, table: RotaryTable, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if self.rows is None or self.key is None or self.key[0] is not table or self.key[1] is not positions_T:
            self.key, self.rows = (table, positions_T), table.rows(positions_T)
        return self.rows


class PackedAttend:
    """The trainer's attention: whole sequences packed one after another, no cache, differentiable.

    Built once per micro-batch.
    """

    def __init__(
        self,
        ops: Ops,
        attention: str,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`attention`: auto, or what `ops.attention` allows.

        `cu_seqlens`: int [S + 1], from 0 to the number of tokens, increasing; on the host, with the tokens' `device`,
        it costs no wait.
        """
        self.ops = ops
        self.attention = None if attention == "auto" else ops.attention(attention)
        """None: by dtype, at the call."""
        self.sequences = pack_sequences(cu_seqlens, max_seqlen, device)
        self.rotary = RotaryRows()
        self.slots = None

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        cos, sin = self.rotary.of(spec.rope, positions_T)
        q_TNH, k_TKH = self.ops.rotate(q_TNH, k_TKH, Rotation(cos, sin, spec.q_norm, spec.k_norm, spec.norm_eps))
        return self.ops.packed_attention(q_TNH, k_TKH, v_TKH, self.sequences, spec.scale, spec.window, self.attention)
