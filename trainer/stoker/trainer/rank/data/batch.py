"""The micro-batch: the packed tokens of one forward and backward pass, as numpy arrays.

Shape legend: T tokens of all sequences of the micro-batch, laid end to end.

Made by the loader, read by the training step. Never changed. Ranks of `context` have a part of it each
(`context_share`).
"""

# ruff: noqa: N815  (fields carry shape suffixes)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class MicroBatch:
    """`micro_batch_size` sequences of `sequence_length` tokens.

    T is the same for every micro-batch of a run: room that no document fills is padded.
    """

    tokens_T: Array
    """int64 token ids."""
    positions_T: Array
    """int64; from 0 in every document, and in every part of a document that was cut."""
    targets_T: Array
    """int64; the next token of the same document, 0 where there is none (`weights_T` is then 0)."""
    weights_T: Array
    """float32; 1 where the target counts in the loss, 0 elsewhere (padding, tokens of other roles than assistant)."""
    cu_seqlens: Array
    """int32; where documents begin, from 0 to T; of all ranks of `context` together.

    Attention stays between two neighbours. Padding is a document of its own.
    """
    max_seqlen: int
    """Tokens of the longest document."""
    whole_targets: float | None = None
    """Sum of the weights of the whole micro-batch, where this is the share of one rank."""

    @property
    def num_targets(self) -> float:
        """Sum of the weights of the whole micro-batch."""
        return float(self.weights_T.sum()) if self.whole_targets is None else self.whole_targets
