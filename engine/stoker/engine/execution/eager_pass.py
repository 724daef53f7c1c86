"""Passes of any size, whose kernels are launched one by one: those longer than the largest graph, and all without
graphs.

Over several ranks a long pass runs as two halves: while the ranks' parts of one half are added, the other one computes.
The second half of a prompt that is cut in two reads what the first has written to the cache. T tokens, C chunks.

Owned by the runner.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.engine.execution.seats import SeatTables
from stoker.engine.execution.staging import Staging
from stoker.engine.execution.step_rows import StepRows, rows_between
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch

HALVED_TOKENS = 4096
"""Shortest pass that runs as two halves: each still fills the products, and takes longer than a sum's start."""


class EagerPass:
    """Computes the hidden states of a step's tokens."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        seats: SeatTables,
        staging: Staging,
        attend: PagedAttend,
        halved: int | None,
    ) -> None:
        """`halved`: shortest pass that runs as two halves; None: none does."""
        self.model, self.cache, self.seats, self.staging = model, cache, seats, staging
        self.halved = halved
        self.attends = [attend]
        if halved is not None:
            self.attends.append(PagedAttend(model.ops, attend.attention, cache, attend.size, None, attend.prompts))

    def compute(self, rows: StepRows, stream_2TD: Tensor | None = None) -> Tensor:
        """Return hidden_TD, or of a pipeline's stage what `Decoder.stage` returns for the rows that entered it."""
        if self.halved is None or rows.num_tokens < max(self.halved, 2):
            return self.model.stage(self._prepared(rows, self.attends[0]), stream_2TD)
        middle, end = rows.num_tokens // 2, rows.num_tokens
        halves = (rows_between(rows, 0, middle), rows_between(rows, middle, end))
        return self.model.in_parts(
            [self._prepared(half, attend) for half, attend in zip(halves, self.attends, strict=True)]
        )

    def _prepared(self, rows: StepRows, attend: PagedAttend) -> PartOfPass:
        chunk_T = np.repeat(np.arange(len(rows.seats)), rows.lengths)
        positions_T = np.arange(rows.num_tokens) + (rows.starts - rows.begins[:-1])[chunk_T]
        self._prepare_attention(attend, rows, chunk_T, positions_T)
        places_T = rows.seats[chunk_T] * self.seats.tokens_SL.shape[1] + positions_T
        places, positions = self.staging.send(places_T, positions_T)
        return PartOfPass(self.seats.tokens_SL.view(-1).index_select(0, places), positions, attend)

    def _prepare_attention(
        self, attend: PagedAttend, rows: StepRows, chunk_T: np.ndarray, positions_T: np.ndarray
    ) -> None:
        """Compute slots and tables of all tokens at once."""
        block_size = self.cache.block_size
        tables = self.seats.tables[rows.seats, : -(-int(rows.ends.max()) // block_size)]
        slots = tables[chunk_T, positions_T // block_size] * block_size + positions_T % block_size
        batch = PagedBatch(
            query_start=torch.from_numpy(rows.begins.astype(np.int32)),
            seq_lens=torch.from_numpy(rows.ends.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots.astype(np.int32)),
            num_tokens=rows.num_tokens,
        )
        attend.prepare(batch)
