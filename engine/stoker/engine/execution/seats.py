"""What a rank keeps per seat: tokens, block table and sampling values, on the host and on the device.

The host knows block tables and values at all times; of the tokens only the device has all, because what a step samples
stays there. S seats, L longest sequence, C columns of a table, E stop tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker.engine.execution.sampler import SeatValues
from stoker.engine.execution.staging import Staging
from stoker.engine.execution.step import Opening, TableEntry
from stoker.model.kernels.sampling import NUMBERS, SamplingTable

NUM_STOPS = 8
"""Stop tokens of a seat that the device tests; the host tests all."""
NEVER = 2**31 - 1
"""A sequence that has not ended ends at this position."""


class SeatTables:
    """Rows of tensors; a row's content is its sequence's until the seat opens again."""

    def __init__(self, num_seats: int, max_model_len: int, max_blocks: int, staging: Staging) -> None:
        self.staging = staging
        device = staging.device
        self.tokens_SL = torch.zeros(num_seats, max_model_len + 1, dtype=torch.int32, device=device)
        self.tables = np.zeros((num_seats, max_blocks), dtype=np.int32)
        self.values = SeatValues(num_seats)

    def open(self, openings: tuple[Opening, ...]) -> None:
        """Sequences take their seats."""
        if not openings:
            return
        row_length = self.tokens_SL.shape[1]
        for opening in openings:
            self.values.open(opening)
        places = [opening.seat * row_length + np.arange(len(opening.tokens)) for opening in openings]
        tokens = [np.asarray(opening.tokens, dtype=np.int32) for opening in openings]
        places_T, tokens_T = self.staging.send(np.concatenate(places), np.concatenate(tokens))
        self.tokens_SL.view(-1).index_copy_(0, places_T, tokens_T)

    def enter(self, table: tuple[TableEntry, ...]) -> None:
        """Write new entries of block tables."""
        self.enter_host(table)

    def enter_host(self, table: tuple[TableEntry, ...]) -> None:
        """Write new entries into the host's copy alone."""
        if table:
            seats, columns, blocks = np.array(table, dtype=np.int32).T
            self.tables[seats, columns] = blocks


class DeviceSeatTables(SeatTables):
    """Everything on the device, too, so that a decode step needs only seats and positions from the host."""

    def __init__(self, num_seats: int, max_model_len: int, max_blocks: int, staging: Staging) -> None:
        super().__init__(num_seats, max_model_len, max_blocks, staging)
        device = staging.device
        self.tables_SC = torch.zeros(num_seats, max_blocks, dtype=torch.int32, device=device)
        self.ended_S = torch.full((num_seats,), NEVER, dtype=torch.int32, device=device)
        """Where the stop test found the sequence's last token."""
        self.stops_SE = torch.full((num_seats, NUM_STOPS), -1, dtype=torch.int32, device=device)
        self.num_prompt_S = torch.zeros(num_seats, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(
            numbers=torch.zeros(num_seats, len(NUMBERS), device=device),
            keys=torch.zeros(num_seats, 2, dtype=torch.int64, device=device),
        )

    def open(self, openings: tuple[Opening, ...]) -> None:
        super().open(openings)
        if not openings:
            return
        seats = np.array([opening.seat for opening in openings], dtype=np.int64)
        stops = np.full((len(seats), NUM_STOPS), -1, dtype=np.int32)
        for row, opening in enumerate(openings):
            first = opening.stop_tokens[:NUM_STOPS]
            stops[row, : len(first)] = first
        values = self.values
        sent = self.staging.send(
            seats,
            values.numbers[seats].astype(np.float32),
            values.keys[seats],
            values.num_prompt[seats].astype(np.int32),
            stops,
            np.full(len(seats), NEVER, dtype=np.int32),
        )
        targets = (self.sampling.numbers, self.sampling.keys, self.num_prompt_S, self.stops_SE, self.ended_S)
        for target, rows in zip(targets, sent[1:], strict=True):
            target.index_copy_(0, sent[0], rows)

    def enter(self, table: tuple[TableEntry, ...]) -> None:
        """Entries that a decode step's own inputs bring need not be among them."""
        super().enter(table)
        if table:
            seats, columns, blocks = np.array(table, dtype=np.int64).T
            places_E, blocks_E = self.staging.send(seats * self.tables_SC.shape[1] + columns, blocks.astype(np.int32))
            self.tables_SC.view(-1).index_copy_(0, places_E, blocks_E)
