"""The share of each micro-batch that a rank of the context axis trains: its tokens, and the bounds of all documents.

Wraps the data loader where a sequence is cut over ranks; made by `build`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from stoker.model.context_cut import ContextCut
from stoker.trainer.protocol.messages import SourceProgress
from stoker.trainer.rank.data.batch import Array, MicroBatch
from stoker.trainer.rank.loop import Batches
from stoker.trainer.rank.mesh import Mesh


class SharedBatches:
    """The loader's micro-batches, cut to one rank of `ranks`."""

    def __init__(self, whole: Batches, ranks: int, rank: int) -> None:
        self._whole, self._ranks, self._rank = whole, ranks, rank

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        """See `Batches`."""
        return (self._cut(batch) for batch in self._whole.micro_batches(step, dp_rank, dp_size))

    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        """See `Batches`."""
        return (self._cut(batch) for batch in self._whole.validation(dp_rank, dp_size))

    def target_tokens(self, step: int) -> int:
        """See `Batches`: over all ranks, so the loss is divided by the same number as on one rank."""
        return self._whole.target_tokens(step)

    def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]:
        """See `Batches`."""
        return self._whole.progress(step, left_out)

    def cursor(self, step: int) -> dict[str, Any]:
        """See `Batches`."""
        return self._whole.cursor(step)

    def check(self, cursor: Mapping[str, Any]) -> None:
        """See `Batches`."""
        self._whole.check(cursor)

    def _cut(self, batch: MicroBatch) -> MicroBatch:
        own = own_tokens(ContextCut(len(batch.tokens_T), self._ranks), self._rank)
        names = ("tokens_T", "positions_T", "targets_T", "weights_T")
        shares = {name: getattr(batch, name)[own] for name in names}
        return replace(batch, **shares, whole_targets=batch.num_targets)


def share_batches(whole: Batches, mesh: Mesh) -> Batches:
    """Return the micro-batches as this rank trains them."""
    ranks = mesh.dims.context
    if ranks == 1:
        return whole
    return SharedBatches(whole, ranks, mesh.dims.coordinates(mesh.rank).context)


@lru_cache(maxsize=8)
def own_tokens(cut: ContextCut, rank: int) -> Array:
    return np.array(cut.tokens(rank))
