"""A step's chunks in the order of their rows: sequences that decode first, prompts behind them. Host numbers, no
device.

C chunks, B samples, T tokens.

Called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stoker.engine.execution.step import StepInput


@dataclass(frozen=True)
class StepRows:
    """Chunks in the order of their rows, samples in the order of the step. All int64."""

    seats: np.ndarray
    """[C], as `starts` and `lengths`."""
    starts: np.ndarray
    lengths: np.ndarray
    num_decodes: int
    """Number of leading chunks that are one token and sample for their own seat; row i is chunk i."""
    places: np.ndarray
    """[C] index of each of the step's chunks in this order."""
    sample_chunks: np.ndarray
    """[B] chunk, in this order, whose last row gives the sample."""
    sample_seats: np.ndarray
    """[B]"""

    @property
    def num_prompts(self) -> int:
        """Number of chunks that are not decodes."""
        return len(self.seats) - self.num_decodes

    @property
    def num_others(self) -> int:
        """Number of samples that are not a decode's own: of prompts and for forks."""
        return len(self.sample_seats) - self.num_decodes

    @cached_property
    def begins(self) -> np.ndarray:
        """[C + 1] each chunk's first row, and the end."""
        return np.concatenate(([0], self.lengths.cumsum()))

    @property
    def num_tokens(self) -> int:
        return int(self.begins[-1])

    @cached_property
    def ends(self) -> np.ndarray:
        """[C] tokens of each sequence that are in the cache after the step."""
        ends: np.ndarray = self.starts + self.lengths
        return ends

    @cached_property
    def sample_rows(self) -> np.ndarray:
        """[B] row whose hidden state gives the sample."""
        rows: np.ndarray = self.begins[self.sample_chunks + 1] - 1
        return rows

    @cached_property
    def sample_positions(self) -> np.ndarray:
        """[B] position of the sampled token."""
        positions: np.ndarray = self.ends[self.sample_chunks]
        return positions

    @cached_property
    def is_own(self) -> np.ndarray:
        """[B] whether the sample is a decode's own."""
        is_own: np.ndarray = self.seats[self.sample_chunks] == self.sample_seats
        return is_own & (self.sample_chunks < self.num_decodes)


def step_rows(step: StepInput) -> StepRows:
    """Order a step's chunks by rows. The sort is stable: chunks that are in order stay so."""
    seats, starts, lengths = (np.array(numbers, dtype=np.int64) for numbers in (step.seats, step.starts, step.lengths))
    sample_chunks, sample_seats = (
        np.array(numbers, dtype=np.int64) for numbers in (step.sample_chunks, step.sample_seats)
    )
    own = (lengths[sample_chunks] == 1) & (seats[sample_chunks] == sample_seats)
    decodes = np.zeros(len(seats), dtype=bool)
    decodes[sample_chunks[own]] = True
    order = np.argsort(~decodes, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return StepRows(
        seats=seats[order],
        starts=starts[order],
        lengths=lengths[order],
        num_decodes=int(decodes.sum()),
        places=places,
        sample_chunks=places[sample_chunks],
        sample_seats=sample_seats,
    )


def rows_between(rows: StepRows, begin: int, end: int) -> StepRows:
    """Return the chunks, and parts of chunks, in the rows from `begin` to before `end`; without samples."""
    first = np.maximum(rows.begins[:-1], begin)
    lengths = np.minimum(rows.begins[1:], end) - first
    kept = lengths > 0
    nothing = np.empty(0, dtype=np.int64)
    return StepRows(
        seats=rows.seats[kept],
        starts=(rows.starts + first - rows.begins[:-1])[kept],
        lengths=lengths[kept],
        num_decodes=int(kept[: rows.num_decodes].sum()),
        places=nothing,
        sample_chunks=nothing,
        sample_seats=nothing,
    )


def no_rows() -> StepRows:
    """The rows of a step of padding alone."""
    nothing = np.empty(0, dtype=np.int64)
    return StepRows(nothing, nothing, nothing, 0, nothing, nothing, nothing)
