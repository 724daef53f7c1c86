"""Decode steps at fixed sizes: one pass of the model over one token per sequence, as a CUDA graph where one was captured.

A step of B sequences runs at the smallest size that holds them. Its only input from the host is three numbers per row;
tokens, slots, tables and the sampled token stay on the device. A size is captured at the first idle moment, the largest
first so that they share one pool of memory, or after its first step, which ran without a graph. What a graph's kernels
read lies in fixed buffers; what they compute is overwritten by the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stoker.engine.seats import DeviceSeatTables
from stoker.engine.staging import Staging
from stoker.model.decoder import Decoder
from stoker.model.kernels.sampling import SampleRows
from stoker.model.paged_attend import KVCache, PagedAttend, PagedSize

log = logging.getLogger("stoker.engine")

Replay = Callable[[], None]


class Kind(NamedTuple):
    """What a graph holds."""

    size: int
    """Rows."""
    samples: bool
    """Output layer and sampler, too; else it ends with hidden states, because some row wants more than the sampler does."""
    filtered: bool
    """The sampler's part for top-k, top-p and min-p."""


class Capture(Protocol):
    """Makes a graph of what `body` launches."""

    def __call__(self, body: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """CUDA graphs in one pool of memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to hear about
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay


@dataclass
class _Rows:
    """One size's buffers. All int32 on the device."""

    attend: PagedAttend
    inputs: Tensor
    """[3, B]: seats, positions and blocks; what the host writes."""
    tokens: Tensor
    """[B]"""
    positions: Tensor
    following: Tensor
    """Where the sampled tokens will stand."""
    out: Tensor
    """[2, B]: sampled tokens, and whether they are valid; what the host reads."""


class DecodeGraphs:
    """All sizes. `run` computes one step."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        whole: PagedAttend,
        seats: DeviceSeatTables,
        staging: Staging,
        sizes: Sequence[int],
        capture: Capture | None,
    ) -> None:
        """`whole`: for the largest step; all sizes share its buffers. `sizes`: rising; `capture` None: no graphs."""
        self.model, self.cache, self.whole = model, cache, whole
        self.seats, self.staging, self.sizes, self.capture = seats, staging, tuple(sizes), capture
        self.graphs: dict[Kind, Replay] = {}
        self.hidden: dict[Kind, Tensor] = {}
        """Where a graph without sampler leaves its hidden states."""
        self.rows: dict[int, _Rows] = {}
        longest = self.sizes[-1]
        device = staging.device
        self.inputs = torch.full((3 * longest,), -1, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(5 * longest, dtype=torch.int32, device=device)
        self.warmed = 0

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds so many rows."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def run(self, kind: Kind, seats_B: np.ndarray, positions_B: np.ndarray, blocks_B: np.ndarray) -> Tensor:
        """Sampled tokens and validity [2, size], or hidden states [size, D]: valid until the next step."""
        rows = self._rows(kind.size)
        inputs = np.zeros((3, kind.size), dtype=np.int32)
        inputs[0, len(seats_B) :] = -1
        inputs[:, : len(seats_B)] = seats_B, positions_B, blocks_B
        self.staging.fill(rows.inputs, inputs)
        if kind in self.graphs:
            self.graphs[kind]()
            return rows.out if kind.samples else self.hidden[kind]
        result = self._compute(kind, rows)
        if self.capture is not None:
            self._make(kind, rows)
        return result

    def warm(self, kinds: Sequence[Kind]) -> bool:
        """Capture the first of `kinds` that is missing. False: there is none."""
        missing = next((kind for kind in kinds if kind not in self.graphs), None)
        if missing is None or self.capture is None:
            return False
        self.rehearse(missing)  # whatever is compiled or allocated at a first call must not be captured
        self._make(missing, self._rows(missing.size))
        return True

    def rehearse(self, kind: Kind) -> None:
        """A step of nothing but padding."""
        rows = self._rows(kind.size)
        rows.inputs[0].fill_(-1)
        self._compute(kind, rows)

    def _make(self, kind: Kind, rows: _Rows) -> None:
        """Without memory for it there are no more graphs, and steps go on without them."""
        assert self.capture is not None

        def body() -> None:
            result = self._compute(kind, rows)
            if not kind.samples:
                self.hidden[kind] = result

        try:
            self.graphs[kind] = self.capture(body)
        except torch.OutOfMemoryError as error:
            log.warning("no memory for the graph of %s, nor for others: %s", kind, error)
            self.capture = None

    def _compute(self, kind: Kind, rows: _Rows) -> Tensor:
        """Launch everything; nothing here depends on numbers that only the host knows."""
        self._enter(rows)
        hidden_BD: Tensor = self.model(rows.tokens, rows.positions, rows.attend)
        if not kind.samples:
            return hidden_BD
        logits_BV = self.model.logits(hidden_BD)
        from stoker.engine import step_kernels  # imports triton, which a machine without a GPU may lack

        seats_B = rows.inputs[0]
        sampled = self.model.ops.sample(
            logits_BV,
            SampleRows(seats_B, rows.following, kind.filtered),
            self.seats.sampling,
            None,
            self.seats.tokens_SL,
        )
        step_kernels.finish_rows(
            seats_B, rows.following, sampled.tokens, sampled.valid, self.seats.stops_SE, self.seats.ended_S, rows.out
        )
        return rows.out

    def _enter(self, rows: _Rows) -> None:
        from stoker.engine import step_kernels  # as above

        attend, buffers, size = rows.attend, rows.attend.buffers, len(rows.tokens)
        assert buffers is not None, "fused kernels have them"
        step_kernels.decode_inputs(
            rows.inputs,
            self.seats.tokens_SL,
            self.seats.tables_SC,
            self.seats.ended_S,
            tokens_B=rows.tokens,
            positions_B=rows.positions,
            next_B=rows.following,
            slots_B=buffers.slots,
            seq_lens_B=buffers.seq_lens,
            block_tables_BC=buffers.block_tables,
            block_size=self.cache.block_size,
        )
        attend.adopt(num_tokens=size, num_sequences=size, num_decodes=size)

    def _rows(self, size: int) -> _Rows:
        """Made at a size's first use. All sizes share one piece of memory."""
        if size not in self.rows:
            limits = PagedSize(max_tokens=size, max_sequences=size, max_blocks=self.seats.tables_SC.shape[1])
            attend = PagedAttend(self.model.ops, self.whole.attention, self.cache, limits, self.whole.buffers)
            tokens_B, positions_B, next_B, out = torch.split(self.outputs[: 5 * size], [size, size, size, 2 * size])
            inputs_3B = self.inputs[: 3 * size].view(3, size)
            self.rows[size] = _Rows(attend, inputs_3B, tokens_B, positions_B, next_B, out.view(2, size))
        return self.rows[size]


def decode_sizes(num_seats: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 rows up to 256, then every 32, and the number of seats itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, num_seats, 32)]
    return (*(size for size in sizes if size < num_seats), num_seats)
