"""Arguments of rotating q and k, as values. T tokens, H head_dim.

Made by `attend` and `paged_attend`, read by the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stoker.model.kernels.sequences import DeviceSequences, PagedSequences


class Rotation(NamedTuple):
    """The normalisation and rotation of each head of q and k."""

    cos: Tensor
    """[T, 1, H], float32: the positions' rows of the RotaryTable."""
    sin: Tensor
    """[T, 1, H], float32, with the sign of the half that it multiplies."""
    q_norm: Tensor | None = None
    """[H]: weight of the norm over each head, before the rotation; None: no norm. Both norms or none."""
    k_norm: Tensor | None = None
    eps: float = 0.0
    """Added to the mean square in the norms."""


class CacheLayer(NamedTuple):
    """One layer of the key/value cache, and the sequences whose tokens a pass writes there."""

    cache: Tensor
    """[blocks, layers, 2, block_size, K, H]; 2: keys, values."""
    layer: int
    """Index into the cache's layers."""
    sequences: PagedSequences | DeviceSequences
