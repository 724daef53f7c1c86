"""Seats: tokens, block table and sampling values of each running sequence, on the host and on the device.

The host knows block tables and values at all times. Only the device has all tokens, because sampled ones stay there.
S seats, L longest sequence, C columns of a table, E stop tokens.

Owned and changed by the runner.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker.engine.execution.sampler import SeatValues
from stoker.engine.execution.staging import Staging
from stoker.engine.execution.step import Opening, TableEntry
from stoker.model.kernels.sampling import NUMBERS, SamplingTable

NUM_STOPS = 8
"""Stop tokens per seat that the device tests; the host tests all."""
NEVER = 2**31 - 1
"""End position of a sequence that has not ended."""


class SeatTables:
    """One row per seat, which belongs to its sequence until the seat is opened again."""

    def __init__(self, num_seats: int, max_model_len: int, max_blocks: int, staging: Staging) -> None:
        self.staging = staging
        device = staging.device
        self.tokens_SL = torch.zeros(num_seats, max_model_len + 1, dtype=torch.int32, device=device)
        self.tables = np.zeros((num_seats, max_blocks), dtype=np.int32)
        self.values = SeatValues(num_seats)

    def open(self, openings: tuple[Opening, ...]) -> None:
        """Write everything known about new sequences into their seats."""
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
    """Seats with all values on the device, too, so that a decode step needs only seats and positions from the host."""

    def __init__(self, num_seats: int, max_model_len: int, max_blocks: int, staging: Staging) -> None:
        super().__init__(num_seats, max_model_len, max_blocks, staging)
        device = staging.device
        self.tables_SC = torch.zeros(num_seats, max_blocks, dtype=torch.int32, device=device)
        self.ended_S = torch.full((num_seats,), NEVER, dtype=torch.int32, device=device)
        """Position at which the stop test found the sequence's last token."""
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
        """Write new entries on host and device. Those that a pass's own inputs bring may be left out."""
        super().enter(table)
        if table:
            seats, columns, blocks = np.array(table, dtype=np.int64).T
            places_E, blocks_E = self.staging.send(seats * self.tables_SC.shape[1] + columns, blocks.astype(np.int32))
            self.tables_SC.view(-1).index_copy_(0, places_E, blocks_E)
