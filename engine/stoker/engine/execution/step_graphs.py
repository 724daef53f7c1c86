"""Passes of fixed size: a step padded to the next shape, as a CUDA graph where one was captured.

The host sends only a few numbers per sequence; tokens, slots, tables and sampled tokens stay on the device. Shapes are
captured before the first request and between steps, never within one: until a shape has its graph, a larger one stands
in for it. A graph's kernels read fixed buffers, and the next step overwrites their results. Several ranks capture the
same shapes in the same order, and keep a graph only if all of them have it: otherwise they would pad steps differently.

Owned by the runner.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from stoker.engine.execution.dealt_draw import draw
from stoker.engine.execution.pass_inputs import PassInputs, pack_inputs, packed_length, split
from stoker.engine.execution.pass_shape import PassShape, PassShapes, lost_rows, stand_in
from stoker.engine.execution.seats import DeviceSeatTables
from stoker.engine.execution.staging import Staging
from stoker.engine.execution.step_rows import StepRows, no_rows
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.kernels.sampling import SampleRows
from stoker.model.paged_attend import KVCache, PagedAttend, PagedSize

log = logging.getLogger("stoker.engine")

Replay = Callable[[], None]
Agree = Callable[[bool], bool]
"""Whether something holds on every rank; called by all of them."""

KEPT_BYTES = 256 * 2**20
"""Free memory that graphs leave to other steps."""


class Capture(Protocol):
    """Captures the kernels that `body` launches as a graph."""

    def __call__(self, body: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """CUDA graphs in one memory pool, captured on their own stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Replay:
        """Capture a graph. Raises OutOfMemoryError where too little memory would be left."""
        free_bytes = torch.cuda.mem_get_info(self.device)[0]
        if free_bytes < KEPT_BYTES:
            raise torch.OutOfMemoryError(f"{free_bytes} bytes are free, {KEPT_BYTES} are kept for other steps")
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to raise
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay


@dataclass
class _Pass:
    """The buffers of one shape, all int32 on the device."""

    attend: PagedAttend
    packed: Tensor
    """The inputs that the host writes."""
    inputs: PassInputs[Tensor]
    """Views of `packed`."""
    tokens: Tensor
    """[T]"""
    positions: Tensor
    out: Tensor
    """[2, B] sampled tokens and their validity, which the host reads."""


class StepGraphs:
    """Passes of all shapes; `compute` runs one step."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        whole: PagedAttend,
        seats: DeviceSeatTables,
        staging: Staging,
        shapes: PassShapes,
        capture: Capture | None,
        agree: Agree = bool,
    ) -> None:
        """`whole`: attention for the largest step, whose buffers all shapes share. `capture` None: no graphs."""
        self.model, self.cache, self.whole, self.agree = model, cache, whole, agree
        self.seats, self.staging, self.shapes, self.capture = seats, staging, shapes, capture
        self.kinds = model.blocks_of_each_kind()
        self.graphs: dict[PassShape, Replay] = {}
        self.wanted: Counter[PassShape] = Counter()
        """Rows of padding that a shape without a graph would have saved, or what launching one by one costs in rows."""
        self.passes: dict[PassShape, _Pass] = {}
        largest, device = shapes.largest, staging.device
        self.numbers = torch.full((packed_length(largest),), -1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(largest.tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(largest.tokens, dtype=torch.int32, device=device)
        self.out = torch.zeros(2 * largest.sequences, dtype=torch.int32, device=device)
        stream = (2, largest.tokens, model.config.hidden_size)
        self.entering = None if model.is_first else torch.zeros(stream, dtype=cache.data.dtype, device=device)
        """What the pipeline's stage before has computed, [2, T, D]."""
        hidden = stream[1:] if model.is_last else stream
        self.hidden = torch.zeros(hidden, dtype=cache.data.dtype, device=device)
        """What a pass without sampler leaves: hidden states [T, D], or what enters the next stage."""
        self.way = ""
        """How the last step was computed (`StepTrace.way`)."""

    def shape_for(self, rows: StepRows, *, samples: bool, filtered: bool) -> PassShape | None:
        """The shape to pad this step to: the smallest, or the next larger one that has a graph.

        `samples`, `filtered`: whether the pass may sample, and whether with filters; of decodes alone. None for steps
        with prompts that have no graph: padding would only cost time.
        """
        needs = (rows.num_tokens, rows.num_decodes, max(rows.num_prompts, rows.num_others))
        exact = self.shapes.choose(*needs)
        if exact is None:
            return None
        if not exact.prompts:
            exact = exact._replace(samples=samples, filtered=filtered)
        if exact in self.graphs:
            return exact
        found = stand_in(exact, *needs, self.graphs)
        self.wanted[exact] += lost_rows(exact, found)
        return found or (None if exact.prompts else exact)

    def compute(self, shape: PassShape, rows: StepRows, stream_2TD: Tensor | None = None) -> Tensor:
        """Compute a step: sampled tokens and validity [2, B], or what `hidden` holds. Valid until the next step.

        `stream_2TD`: the step's rows as they enter a pipeline's further stage.
        """
        if stream_2TD is not None:
            assert self.entering is not None, "rows enter a further stage"
            self.entering[:, : rows.num_tokens].copy_(stream_2TD)
        held = self._pass(shape)
        decodes = slice(rows.num_decodes)
        blocks_D = self.seats.tables[rows.seats[decodes], rows.starts[decodes] // self.cache.block_size]
        self.staging.fill(held.packed, pack_inputs(shape, rows, blocks_D))
        if shape in self.graphs:
            self.way = "graph"
            self.graphs[shape]()
            return held.out if shape.samples else self.hidden[..., : shape.tokens, :]
        self.way = "padded"
        return self._launch_kernels(shape, held)

    def capture_next(self, shapes: Iterable[PassShape]) -> bool:
        """Capture the first of `shapes` without a graph. False: all have one."""
        missing = self.missing(shapes)
        if missing is None:
            return False
        self.capture_shape(missing)
        return True

    def missing(self, shapes: Iterable[PassShape]) -> PassShape | None:
        """The first of `shapes` without a graph; None where all have one, or none can be captured."""
        if self.capture is None:
            return None
        return next((shape for shape in shapes if shape not in self.graphs), None)

    def capture_shape(self, shape: PassShape) -> None:
        """Capture one shape, on all ranks together."""
        self.warm_up(shape, self.kinds)  # compilation and allocation at a first call must not be captured
        self._capture_graph(shape, self._pass(shape))
        self.wanted.pop(shape, None)

    def most_wanted(self, at_least: int) -> Iterator[PassShape]:
        """Shapes whose graphs would have saved at least so many rows, the most first."""
        return (shape for shape, rows in self.wanted.most_common() if rows >= at_least)

    def warm_up(self, shape: PassShape, blocks: Sequence[nn.Module] | None = None) -> None:
        """Compute a step of padding alone; through some blocks where others launch the same kernels."""
        held = self._pass(shape)
        rows = no_rows()
        self.staging.fill(held.packed, pack_inputs(shape, rows, rows.seats))
        self._launch_kernels(shape, held, blocks)

    def _capture_graph(self, shape: PassShape, held: _Pass) -> None:
        """Capture a shape. After a failure, or without memory, no more graphs are captured; steps go on without."""
        assert self.capture is not None

        def body() -> None:
            self._launch_kernels(shape, held)

        graph, problem = None, "another rank cannot capture it"
        try:
            graph = self.capture(body)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            problem = str(error)
        if self.agree(graph is not None) and graph is not None:
            self.graphs[shape] = graph
            return
        log.warning("no graph of %s, nor of others: %s", shape, problem)
        self.capture = None

    def _launch_kernels(self, shape: PassShape, held: _Pass, blocks: Sequence[nn.Module] | None = None) -> Tensor:
        """Launch all kernels of a pass. Nothing here depends on numbers that exist on the host only."""
        self._fill_pass(shape, held)
        stream_2TD = None if self.entering is None else self.entering[:, : shape.tokens]
        hidden_TD = self.model.stage(PartOfPass(held.tokens, held.positions, held.attend), stream_2TD, blocks)
        if not shape.samples:
            return self.hidden[..., : shape.tokens, :].copy_(hidden_TD)
        from stoker.engine.execution import step_kernels  # imports triton, which a machine without a GPU may lack

        inputs, seats = held.inputs, self.seats
        hidden_BD = hidden_TD.index_select(0, inputs.rows) if shape.prompts else hidden_TD
        rows = SampleRows(inputs.seats, inputs.following, shape.filtered)
        sampled = draw(self.model, hidden_BD, rows, seats.sampling)
        step_kernels.finish_rows(
            rows.seats, rows.positions, sampled.tokens, sampled.valid, seats.stops_SE, seats.ended_S, held.out,
            seats.tokens_SL,
        )  # fmt: skip
        return held.out

    def _fill_pass(self, shape: PassShape, held: _Pass) -> None:
        from stoker.engine.execution import step_kernels  # as above

        assert held.attend.buffers is not None, "fused kernels have them"
        step_kernels.fill_pass(
            held.inputs,
            self.seats.tokens_SL,
            self.seats.tables_SC,
            self.seats.ended_S,
            tokens_T=held.tokens,
            positions_T=held.positions,
            buffers=held.attend.buffers,
            block_size=self.cache.block_size,
        )
        held.attend.adopt(num_tokens=shape.tokens, num_sequences=shape.sequences, num_decodes=shape.decodes)

    def _pass(self, shape: PassShape) -> _Pass:
        """The shape's buffers, made at its first use. All shapes share one piece of memory."""
        size = PassShape(*shape[:3])
        if size not in self.passes:
            limits = pass_size(size, self.seats.tables_SC.shape[1])
            packed = self.numbers[: packed_length(size)]
            self.passes[size] = _Pass(
                attend=PagedAttend(self.model.ops, self.whole.attention, self.cache, limits, self.whole.buffers),
                packed=packed,
                inputs=split(packed, size),
                tokens=self.tokens[: size.tokens],
                positions=self.positions[: size.tokens],
                out=self.out[: 2 * size.sequences].view(2, size.sequences),
            )
        return self.passes[size]


def pass_size(shape: PassShape, max_blocks: int) -> PagedSize:
    return PagedSize(max_tokens=shape.tokens, max_sequences=shape.sequences, max_blocks=max_blocks)
