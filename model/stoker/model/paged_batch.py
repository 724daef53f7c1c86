"""One step of the engine as data: how large it may be, and which tokens belong to which sequence.

Immutable; made by the engine's runner, read by `paged_attend`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PagedSize:
    """The largest step that one PagedAttend can hold."""

    max_tokens: int
    max_sequences: int
    max_blocks: int
    """Blocks in one table."""


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """One step's sequences, as int32 tensors.

    A sequence's tokens lie together and are the last ones of it; with fused kernels, sequences of one token come first.

    Reference kernels take host tensors. Fused ones take either kind; what is on the device is not read by the host, so
    `num_decodes` must be given. They also take sequences of length 0 (padding).
    """

    query_start: Tensor
    """[S + 1]: where each sequence's tokens begin, and the end."""
    seq_lens: Tensor
    """[S]: tokens of each sequence, those of this step included."""
    block_tables: Tensor
    """[S, B]: block ids in order; ids beyond a sequence's end are not read."""
    slot_mapping: Tensor
    """[T]: block id * block_size + offset, where each token's key and value go; -1: nowhere (fused kernels)."""
    num_tokens: int
    num_decodes: int | None = None
    """The first so many sequences have one token each. None: read off host tensors."""

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)
