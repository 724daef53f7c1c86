"""Computes steps on one rank: weights, cache, and one row of tensors per seat. Knows no request and no scheduler.

The host knows how far every sequence goes, so positions, slots and tables are built there by a few array operations; the
tokens themselves stay on the device: what a step samples is written into the seat's row, where the next step reads it.
`launch` starts a step and returns at once on a device that works by itself; its result waits for the device once. With
fused kernels a step in which every sequence decodes runs as one graph on buffers of a fixed size (`decode_graphs`).
Shape legend: T tokens of the step, S chunks, B samples, D hidden, V vocabulary, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.engine.decode_graphs import Capture, CudaCapture, DecodeGraphs, Kind, decode_sizes
from stoker.engine.errors import ExecutorLost
from stoker.engine.messages import TokenLogprobs
from stoker.engine.sampler import Logprobs, Rows, Sampled, banned, biased, raw_logprobs, sample, score
from stoker.engine.seats import DeviceSeatTables, SeatTables
from stoker.engine.staging import Fetched, Staging
from stoker.engine.step_input import StepInput, StepOutput
from stoker.model.decoder import Decoder
from stoker.model.kernels.sampling import Adjustments, SampleRows
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch, PagedSize

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at once."""
FIRST_SIZES = 4
"""Decode sizes whose graphs are there before the first request; the others come in idle time."""


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
    sample_seats: Tensor
    sample_places: Tensor
    """[B] position of each sampled token."""
    sample_positions: np.ndarray
    """[B], the same."""


class Launched:
    """A step on its way. `result` waits for the device."""

    def __init__(self, number: int, fetched: Fetched, unpack: Callable[[list[np.ndarray]], StepOutput]) -> None:
        self.number, self.fetched, self.unpack = number, fetched, unpack
        self.output: StepOutput | None = None

    def result(self) -> StepOutput:
        """Raises ExecutorLost where the device failed: nothing after it can be right."""
        if self.output is None:
            try:
                self.output = self.unpack(self.fetched.wait())
            except torch.AcceleratorError as error:
                raise ExecutorLost(f"the device failed in step {self.number}: {error}") from error
        return self.output


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
        graphs: bool | Capture = True,
    ) -> None:
        """`graphs`: whether decode steps are captured, with fused kernels on one rank; or who captures them."""
        self.model, self.cache = model, cache
        self.device = cache.data.device
        self.max_model_len = max_model_len
        self.staging = Staging(self.device)
        max_blocks = -(-max_model_len // cache.block_size)
        size = PagedSize(max_tokens=max_batch_tokens, max_sequences=num_seats, max_blocks=max_blocks)
        self.attend = PagedAttend(model.ops, attention, cache, size)
        self.decode: DecodeGraphs | None = None
        self.seats = SeatTables(num_seats, max_model_len, max_blocks, self.staging)
        if model.ops.kernels == "fused":
            self.seats = seats = DeviceSeatTables(num_seats, max_model_len, max_blocks, self.staging)
            capture = self._capture(graphs)
            sizes = decode_sizes(num_seats)
            self.decode = DecodeGraphs(model, cache, self.attend, seats, self.staging, sizes, capture)
        self.tokens_SL, self.values = self.seats.tokens_SL, self.seats.values

    def _capture(self, graphs: bool | Capture) -> Capture | None:
        if not isinstance(graphs, bool):
            return graphs
        alone = self.model.group is None  # what ranks do together is not captured
        return CudaCapture(self.device) if graphs and alone and self.device.type == "cuda" else None

    def run(self, step: StepInput) -> StepOutput:
        """Compute one step, to the end.

        Raises:
            ExecutorLost: seats could not be brought up to date or the device failed; later steps would be wrong.
        """
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Start one step; on the host it is done when this returns. Raises as `run`."""
        kind = self._decode_kind(step)
        self._apply(step, tables_follow=kind is not None)
        try:
            if self.decode is not None and kind is not None:
                return self._launch_decode(self.decode, kind, step)
            inputs = self._prepare(step)
            hidden_TD = self.model(inputs.tokens, inputs.positions, self.attend)
            scores = self._score(step, inputs, hidden_TD)
            sampled = self._sample(step, inputs, hidden_TD)
            return self._fetch(step, sampled, scores)
        except torch.AcceleratorError as error:
            raise ExecutorLost(f"the device failed in step {step.number}: {error}") from error

    @torch.inference_mode()
    def warm(self, *, first: bool = False) -> bool:
        """Capture one more decode size. False: all are there. `first`: only those that should not be waited for."""
        if self.decode is None:
            return False
        sizes = self.decode.sizes
        order = sizes[:FIRST_SIZES] if first else (*sizes[:FIRST_SIZES], *reversed(sizes))
        return self.decode.warm([Kind(size, samples=True, filtered=False) for size in order])

    @torch.inference_mode()
    def rehearse_decode(self) -> None:
        """Steps of nothing but padding at every size, with and without the sampler's filters: kernels are compiled then."""
        if self.decode is None:
            return
        for size in self.decode.sizes:
            for filtered in (False, True):
                self.decode.rehearse(Kind(size, samples=True, filtered=filtered))

    def _apply(self, step: StepInput, *, tables_follow: bool) -> None:
        """Bring seats, tables and blocks up to date. `tables_follow`: a decode step's inputs bring the tables' new entries."""
        try:
            self.seats.open(step.openings)
            if tables_follow:
                SeatTables.enter(self.seats, step.table)
            else:
                self.seats.enter(step.table)
            if step.cleared:
                (blocks,) = self.staging.send(np.array(step.cleared, dtype=np.int64))
                self.cache.data.index_fill_(0, blocks, 0)
            if step.copies:
                sources, targets = self.staging.send(*np.array(step.copies, dtype=np.int64).T.copy())
                self.cache.data.index_copy_(0, targets, self.cache.data.index_select(0, sources))
        except Exception as error:
            raise ExecutorLost(f"step {step.number} cannot be set up: {error}") from error

    # Decode steps of a fixed size.

    def _decode_kind(self, step: StepInput) -> Kind | None:
        """None: not a step of one token per sequence in which each samples for itself."""
        if self.decode is None or step.openings or step.sample_seats != step.seats or set(step.lengths) != {1}:
            return None
        size = self.decode.size_for(len(step.seats))
        if size is None or any(step.scored):
            return None
        seats, values = list(step.seats), self.values
        next_positions = np.array(step.starts, dtype=np.int64) + 1
        plain = (values.top_logprobs[seats] < 0).all() and (values.adjusted_until[seats] <= next_positions).all()
        return Kind(size, samples=bool(plain), filtered=bool(plain and values.filtered[seats].any()))

    def _launch_decode(self, decode: DecodeGraphs, kind: Kind, step: StepInput) -> Launched:
        seats_B, positions_B = np.array(step.seats), np.array(step.starts)
        blocks_B = self.seats.tables[seats_B, positions_B // self.cache.block_size]
        result = decode.run(kind, seats_B, positions_B, blocks_B)
        count = len(seats_B)
        if not kind.samples:
            sent = self.staging.send(seats_B.astype(np.int32), (positions_B + 1).astype(np.int32))
            sampled = self._draw(self.model.logits(result[:count]), seats_B, positions_B + 1, *sent)
            return self._fetch(step, sampled, [[]] * count)

        def unpack(arrays: list[np.ndarray]) -> StepOutput:
            tokens, valid = arrays[0][:, :count].tolist()
            return StepOutput(step.number, tuple(tokens), tuple(map(bool, valid)), (None,) * count, ((),) * count)

        return Launched(step.number, self.staging.fetch([result]), unpack)

    # Any other step.

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
        token_places_T, positions, last_rows_B, target_B, seats_on_device, places_B = self.staging.send(
            seats[chunk_T] * row_length + positions_T,
            positions_T,
            query_start[chunks_B + 1] - 1,
            seats_B * row_length + sample_positions,
            seats_B.astype(np.int32),
            sample_positions.astype(np.int32),
        )
        tokens_T = self.tokens_SL.view(-1).index_select(0, token_places_T)
        return _Inputs(
            tokens_T, positions, query_start, last_rows_B, target_B, seats_on_device, places_B, sample_positions
        )

    def _prepare_attention(
        self,
        seats: np.ndarray,
        seq_lens: np.ndarray,
        query_start: np.ndarray,
        chunk_T: np.ndarray,
        positions_T: np.ndarray,
    ) -> None:
        block_size, num_tokens = self.cache.block_size, len(positions_T)
        tables = self.seats.tables[seats, : -(-int(seq_lens.max()) // block_size)]
        slots = tables[chunk_T, positions_T // block_size] * block_size + positions_T % block_size
        batch = PagedBatch(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots.astype(np.int32)),
            num_tokens=num_tokens,
        )
        self.attend.prepare(batch)

    def _sample(self, step: StepInput, inputs: _Inputs, hidden_TD: Tensor) -> Sampled | None:
        """Next tokens, written to their seats."""
        if not step.sample_seats:
            return None
        if len(hidden_TD) > len(step.seats) or step.sample_chunks != tuple(range(len(step.seats))):
            hidden_TD = hidden_TD.index_select(0, inputs.last_rows)
        logits_BV = self.model.logits(hidden_TD)
        if self.decode is not None:
            seats_B = np.array(step.sample_seats)
            return self._draw(logits_BV, seats_B, inputs.sample_positions, inputs.sample_seats, inputs.sample_places)
        rows = Rows(self.values, step.sample_seats, inputs.sample_positions, self.device)
        sampled = sample(logits_BV, rows, self.tokens_SL, self.model.ops)
        self.tokens_SL.view(-1).index_copy_(0, inputs.targets, sampled.tokens.to(self.tokens_SL.dtype))
        return sampled

    def _draw(
        self, logits_BV: Tensor, seats: np.ndarray, positions: np.ndarray, seats_B: Tensor, places_B: Tensor
    ) -> Sampled:
        """With the fused sampler; adjustments and log-probabilities only where a row asks for them."""
        assert isinstance(self.seats, DeviceSeatTables)
        rows = Rows(self.values, seats, positions, self.device)
        logprobs_of = raw_logprobs(logits_BV, rows, self.model.ops)
        adjusts = bool((self.values.adjusted_until[seats] > positions).any())
        sampled = self.model.ops.sample(
            logits_BV,
            SampleRows(seats_B, places_B, bool(self.values.filtered[seats].any())),
            self.seats.sampling,
            self._adjustments(rows, self.seats) if adjusts else None,
            self.tokens_SL,
        )
        return Sampled(sampled.tokens, sampled.valid, logprobs_of(sampled.tokens) if logprobs_of else None)

    def _adjustments(self, rows: Rows, seats: DeviceSeatTables) -> Adjustments:
        entries = sorted([*((row, token, -np.inf) for row, token in set(banned(rows))), *biased(rows)])
        counts = np.bincount([row for row, _, _ in entries], minlength=len(rows.seats)) if entries else np.zeros(1)
        starts = np.zeros(len(rows.seats) + 1, dtype=np.int32)
        starts[1:] = counts.cumsum() if entries else 0
        start, tokens, biases = self.staging.send(
            starts,
            np.array([token for _, token, _ in entries], dtype=np.int32),
            np.array([bias for _, _, bias in entries], dtype=np.float32),
        )
        penalised = any(rows.values.params[seat].penalised for seat in rows.seats)
        return Adjustments(self.tokens_SL, seats.num_prompt_S, start, tokens, biases, penalised)

    # Results.

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

    def _fetch(self, step: StepInput, sampled: Sampled | None, scores: list[list[Logprobs]]) -> Launched:
        """Everything on its way to the host."""
        tensors: list[Tensor] = []
        if sampled is not None:
            tensors += (sampled.tokens, sampled.valid, *(sampled.logprobs or ()))
        tensors += [tensor for parts in scores for part in parts for tensor in part]
        has_logprobs = sampled is not None and sampled.logprobs is not None
        wanted = self.values.top_logprobs[list(step.sample_seats)].tolist()
        num_parts = [len(parts) for parts in scores]

        def unpack(arrays: list[np.ndarray]) -> StepOutput:
            return _unpacked(step, arrays, wanted if has_logprobs else None, num_parts)

        return Launched(step.number, self.staging.fetch(tensors), unpack)


def _unpacked(
    step: StepInput, arrays: list[np.ndarray], wanted: Sequence[int] | None, num_parts: list[int]
) -> StepOutput:
    """`wanted`: per sample how many top log-probabilities it asks for, -1 for none at all; None where nobody asks."""
    rest = iter(arrays)
    tokens: tuple[int, ...] = ()
    valid: tuple[bool, ...] = ()
    if step.sample_seats:
        tokens, valid = tuple(next(rest).tolist()), tuple(next(rest).tolist())
    logprobs: tuple[TokenLogprobs | None, ...] = (None,) * len(tokens)
    if wanted is not None:
        entries = iter(_entries([next(rest) for _ in range(3)], [count for count in wanted if count >= 0]))
        logprobs = tuple(next(entries) if count >= 0 else None for count in wanted)
    prompts = tuple(
        tuple(entry for _ in range(count) for entry in _entries([next(rest) for _ in range(3)], None))
        for count in num_parts
    )
    return StepOutput(step.number, tokens, valid, logprobs, prompts)


def _entries(arrays: list[np.ndarray], counts: list[int] | None) -> list[TokenLogprobs]:
    """Values for people, from chosen [rows], top tokens and top logprobs [rows, k]; the first `counts[row]` of the top."""
    chosen, top_tokens, top = (array.tolist() for array in arrays)
    widths = counts if counts is not None else [len(row) for row in top]
    return [
        TokenLogprobs(logprob, tuple(zip(tokens[:width], values[:width], strict=True)))
        for logprob, tokens, values, width in zip(chosen, top_tokens, top, widths, strict=True)
    ]
