"""Computes steps on one rank: weights, cache, and one row of tensors per seat. Knows no request and no scheduler.

The host knows how far every sequence goes, so positions, slots and tables are built there by a few array operations; the
tokens themselves stay on the device: what a step samples is written into the seat's row, where the next step reads it.
A step copies its numbers to the device once, and waits for it once, for the result.
Shape legend: T tokens of the step, S chunks, B samples, D hidden, V vocabulary, L longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.engine.errors import ExecutorLost
from stoker.engine.messages import TokenLogprobs
from stoker.engine.sampler import Logprobs, Rows, Sampled, SeatValues, sample, score
from stoker.engine.step_input import StepInput, StepOutput
from stoker.model.decoder import Decoder
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch, PagedSize

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at once."""


@dataclass(frozen=True)
class _Inputs:
    """One step's numbers. Views into buffers that the next step overwrites."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    query_start: np.ndarray
    """[S + 1]"""
    last_rows: Tensor
    """[B] row of hidden states that gives each sample."""
    targets: Tensor
    """[B] where each sampled token goes in the flat token table."""
    sample_positions: np.ndarray
    """[B]"""


class Runner:
    """One rank's model and cache."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        num_seats: int,
        max_model_len: int,
        max_batch_tokens: int,
        attention: str,
    ) -> None:
        self.model, self.cache = model, cache
        self.device = cache.data.device
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // cache.block_size)
        size = PagedSize(max_tokens=max_batch_tokens, max_sequences=num_seats, max_blocks=max_blocks)
        self.attend = PagedAttend(model.ops, attention, cache, size)
        self.tokens_SL = torch.zeros(num_seats, max_model_len + 1, dtype=torch.int64, device=self.device)
        self.tables = np.zeros((num_seats, max_blocks), dtype=np.int32)
        self.values = SeatValues(num_seats)
        pinned = self.device.type == "cuda"
        self.host = torch.zeros(2 * max_batch_tokens + 2 * num_seats, dtype=torch.int64, pin_memory=pinned)
        self.staged = torch.zeros_like(self.host, device=self.device, pin_memory=False)
        self.slots = torch.zeros(max_batch_tokens, dtype=torch.int32, pin_memory=pinned)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Compute one step.

        Raises:
            ExecutorLost: seats could not be brought up to date or the device failed; later steps would be wrong.
        """
        self._apply(step)
        try:
            inputs = self._prepare(step)
            hidden_TD = self.model(inputs.tokens, inputs.positions, self.attend)
            scores = self._score(step, inputs, hidden_TD)
            sampled = self._sample(step, inputs, hidden_TD)
            return self._fetch(step, sampled, scores)
        except torch.AcceleratorError as error:
            raise ExecutorLost(f"the device failed in step {step.number}: {error}") from error

    def _apply(self, step: StepInput) -> None:
        """Bring seats, tables and blocks up to date."""
        try:
            for opening in step.openings:
                self.values.open(opening)
                self.tokens_SL[opening.seat, : len(opening.tokens)] = torch.tensor(opening.tokens)
            if step.table:
                seats, columns, blocks = np.array(step.table, dtype=np.int32).T
                self.tables[seats, columns] = blocks
            if step.cleared:
                self.cache.data[list(step.cleared)] = 0
            if step.copies:
                sources, targets = zip(*step.copies, strict=True)
                self.cache.copy_blocks(sources, targets)
        except Exception as error:
            raise ExecutorLost(f"step {step.number} cannot be set up: {error}") from error

    def _prepare(self, step: StepInput) -> _Inputs:
        """Positions, slots and tables of all tokens at once."""
        seats, starts, lengths = (np.array(x, dtype=np.int64) for x in (step.seats, step.starts, step.lengths))
        query_start = np.concatenate(([0], lengths.cumsum()))
        num_tokens = int(query_start[-1])
        chunk_T = np.repeat(np.arange(len(seats)), lengths)
        positions_T = np.arange(num_tokens) + (starts - query_start[:-1])[chunk_T]
        self._prepare_attention(seats, starts + lengths, query_start, chunk_T, positions_T)
        chunks_B, seats_B = np.array(step.sample_chunks, dtype=np.int64), np.array(step.sample_seats, dtype=np.int64)
        sample_positions = (starts + lengths)[chunks_B]
        row_length = self.tokens_SL.shape[1]
        token_places_T, positions, last_rows_B, target_B = self._stage(
            seats[chunk_T] * row_length + positions_T,
            positions_T,
            query_start[chunks_B + 1] - 1,
            seats_B * row_length + sample_positions,
        )
        tokens_T = self.tokens_SL.view(-1).index_select(0, token_places_T)
        return _Inputs(tokens_T, positions, query_start, last_rows_B, target_B, sample_positions)

    def _prepare_attention(
        self,
        seats: np.ndarray,
        seq_lens: np.ndarray,
        query_start: np.ndarray,
        chunk_T: np.ndarray,
        positions_T: np.ndarray,
    ) -> None:
        block_size, num_tokens = self.cache.block_size, len(positions_T)
        tables = self.tables[seats, : -(-int(seq_lens.max()) // block_size)]
        slots = tables[chunk_T, positions_T // block_size] * block_size + positions_T % block_size
        self.slots[:num_tokens].numpy()[:] = slots
        batch = PagedBatch(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            slot_mapping=self.slots[:num_tokens],
            num_tokens=num_tokens,
        )
        self.attend.prepare(batch)

    def _stage(self, *arrays: np.ndarray) -> list[Tensor]:
        """Several int64 arrays to the device in one copy, into a fixed buffer."""
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        np.concatenate(arrays, out=self.host[:total].numpy())
        self.staged[:total].copy_(self.host[:total], non_blocking=True)
        return list(torch.split(self.staged[:total], sizes))

    def _sample(self, step: StepInput, inputs: _Inputs, hidden_TD: Tensor) -> Sampled | None:
        """Next tokens, written to their seats."""
        if not step.sample_seats:
            return None
        if len(hidden_TD) > len(step.seats) or step.sample_chunks != tuple(range(len(step.seats))):
            hidden_TD = hidden_TD.index_select(0, inputs.last_rows)
        logits_BV = self.model.logits(hidden_TD)
        rows = Rows(self.values, step.sample_seats, inputs.sample_positions, self.device)
        sampled = sample(logits_BV, rows, self.tokens_SL, self.model.ops)
        self.tokens_SL.view(-1).index_copy_(0, inputs.targets, sampled.tokens)
        return sampled

    def _score(self, step: StepInput, inputs: _Inputs, hidden_TD: Tensor) -> list[list[Logprobs]]:
        """Per chunk: log-probabilities of prompt tokens, a bounded number of rows of logits at a time."""
        return [
            [
                self._score_rows(step, inputs, hidden_TD, chunk, first, min(first + _SCORED_ROWS, scored))
                for first in range(0, scored, _SCORED_ROWS)
            ]
            for chunk, scored in enumerate(step.scored)
        ]

    def _score_rows(
        self, step: StepInput, inputs: _Inputs, hidden_TD: Tensor, chunk: int, first: int, end: int
    ) -> Logprobs:
        row, start, seat = int(inputs.query_start[chunk]), step.starts[chunk], step.seats[chunk]
        logprobs_TV = self.model.ops.log_softmax(self.model.logits(hidden_TD[row + first : row + end]))
        followers_T = self.tokens_SL[seat, start + first + 1 : start + end + 1]
        return score(logprobs_TV, followers_T, self.values.params[seat].prompt_logprobs or 0)

    def _fetch(self, step: StepInput, sampled: Sampled | None, scores: list[list[Logprobs]]) -> StepOutput:
        """Everything to the host, waiting for the device once."""
        host = _HostCopies(self.device)
        if sampled is not None:
            host.add(sampled.tokens, sampled.valid, *(sampled.logprobs or ()))
        for part in (part for parts in scores for part in parts):
            host.add(*part)
        arrays = iter(host.wait())
        tokens: tuple[int, ...] = ()
        valid: tuple[bool, ...] = ()
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if sampled is not None:
            tokens, valid = tuple(next(arrays).tolist()), tuple(next(arrays).tolist())
            logprobs = self._sample_logprobs(step, [next(arrays) for _ in sampled.logprobs or ()])
        prompts = tuple(
            tuple(entry for _ in parts for entry in _entries([next(arrays) for _ in range(3)], None))
            for parts in scores
        )
        return StepOutput(step.number, tokens, valid, logprobs, prompts)

    def _sample_logprobs(self, step: StepInput, arrays: list[np.ndarray]) -> tuple[TokenLogprobs | None, ...]:
        wanted = self.values.top_logprobs[list(step.sample_seats)].tolist()
        if not arrays:
            return (None,) * len(wanted)
        entries = iter(_entries(arrays, [count for count in wanted if count >= 0]))
        return tuple(next(entries) if count >= 0 else None for count in wanted)


class _HostCopies:
    """Tensors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies: list[Tensor] = []

    def add(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if self.device.type == "cpu":
                self.copies.append(tensor)
            else:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self.copies.append(copy.copy_(tensor, non_blocking=True))

    def wait(self) -> list[np.ndarray]:
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()
        return [copy.numpy() for copy in self.copies]


def _entries(arrays: list[np.ndarray], counts: list[int] | None) -> list[TokenLogprobs]:
    """Values for people, from chosen [rows], top tokens and top logprobs [rows, k]; the first `counts[row]` of the top."""
    chosen, top_tokens, top = (array.tolist() for array in arrays)
    widths = counts if counts is not None else [len(row) for row in top]
    return [
        TokenLogprobs(logprob, tuple(zip(tokens[:width], values[:width], strict=True)))
        for logprob, tokens, values, width in zip(chosen, top_tokens, top, widths, strict=True)
    ]
