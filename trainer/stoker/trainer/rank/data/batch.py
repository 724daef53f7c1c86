"""The unit that one forward and backward pass takes: packed tokens, numpy only.

Shape legend: T tokens of all sequences of the micro-batch, laid end to end.
"""

# ruff: noqa: N815  (fields carry shape suffixes)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class MicroBatch:
    """`micro_batch_size` sequences of `sequence_length` tokens. T is the same for every micro-batch of a run: room that no document fills is padded."""

    tokens_T: Array
    """int64 token ids."""
    positions_T: Array
    """int64; they restart at 0 with every document (and with every cut of an over-long one)."""
    targets_T: Array
    """int64; the token that follows in the same document. 0 where `weights_T` is 0 for want of a following token."""
    weights_T: Array
    """float32; 1 where the target counts in the loss, 0 elsewhere (padding, tokens that the assistant did not write)."""
    cu_seqlens: Array
    """int32; where documents begin, from 0 to T. Attention stays between two neighbours. Padding is a document of its own."""
    max_seqlen: int
    """Longest distance between two neighbours in `cu_seqlens`."""
