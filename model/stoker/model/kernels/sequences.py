"""How the tokens of one pass belong to sequences: values that `attend` builds once per pass and the attention kernels read.

T tokens, S sequences, B blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedSequences:
    """Whole sequences one after another."""

    cu_seqlens: Tensor
    """int32 [S + 1] on the tokens' device: where each sequence begins, and the end."""
    max_seqlen: int
    bounds: tuple[int, ...]
    """The same numbers on the host."""


@dataclass(frozen=True)
class CachedSequence:
    """Tokens `[query_start, query_end)` of the pass are the last ones of a sequence whose keys are all in the cache."""

    query_start: int
    query_end: int
    seq_len: int
    """Keys, this pass's own included."""
    block_rows: Tensor
    """int64 [layers, 2 * blocks]: rows of the cache seen as [rows, block_size, kv_heads, head_dim]; all key blocks, then all value blocks."""
    masks: dict[int | None, Tensor | None]
    """Per window: bool [queries, seq_len], true where a query may look; None where plain causal order says it all."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and about the same length, padded to the longest."""

    token_rows: Tensor | None
    """int64 [S]: their places among the tokens; None: the group is the whole pass in order."""
    num_sequences: int
    padded_len: int
    block_rows: Tensor
    """int64 [layers, 2 * S * blocks], as in CachedSequence."""
    key_distances: Tensor
    """int64 [S, 1, 1, padded_len]: distance of each key from the query; negative beyond the sequence's end."""
    masks: dict[int | None, Tensor]
    """Per window: additive [S, 1, 1, padded_len] in the cache's dtype; made at first use."""


@dataclass(frozen=True)
class PagedSequences:
    """One engine step."""

    num_tokens: int
    slot_rows: Tensor
    """int64 [layers, 2 * T]: rows of the cache seen as [rows, kv_heads, head_dim] that the new keys, then the new values go to."""
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[CachedSequence, ...]
    """The other sequences; in deterministic mode all of them, so that every token takes the same path."""
