"""The runner computes steps on one rank: it owns weights, cache memory, and one row of tensors per seat.

The host knows how far every sequence goes, so positions, slots and tables are built there by a few array operations.
The tokens stay on the device: a sampled token is written into its seat's row, where the next step reads it. `launch`
starts a step and returns at once where the device computes beside the host; the result waits for the device once. With
fused kernels a step runs padded to a fixed size, as one graph (`step_graphs`), unless it is so long that the device is
busy for several times as long as the launches take. Shape legend: T tokens of the step, C chunks, B samples, P rows of
samples and padding, D hidden, V vocabulary, L longest sequence.

Called by an executor, one step at a time. It has no requests and no scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.dealt_draw import deals, draw
from stoker.engine.execution.eager_pass import HALVED_TOKENS, EagerPass
from stoker.engine.execution.launched_step import LaunchedStep, StepTiming, unpacked
from stoker.engine.execution.pass_inputs import sample_places
from stoker.engine.execution.pass_shape import MOST_TOKENS, PassShape, padded_rows, pass_shapes
from stoker.engine.execution.sampler import Logprobs, Rows, Sampled, banned, biased, raw_logprobs, sample, score
from stoker.engine.execution.seats import DeviceSeatTables, SeatTables
from stoker.engine.execution.stage_links import StageLinks, TokenWrite
from stoker.engine.execution.staging import Staging
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.execution.step_graphs import Capture, CudaCapture, StepGraphs
from stoker.engine.execution.step_rows import StepRows, step_rows
from stoker.engine.execution.token_mask import mask_logits
from stoker.model.decoder import Decoder
from stoker.model.group_sums import GroupSums
from stoker.model.hosted_experts import hosted_layers
from stoker.model.kernels.long_prompts import PromptAttention, count_pairs
from stoker.model.kernels.sampling import Adjustments, SampleRows
from stoker.model.paged_attend import KVCache, PagedAttend, PagedSize
from stoker.model.paged_prompts import PromptPlan, choose_prompts, prompt_keys

WANTED_ROWS = 8192
"""Rows of padding that a graph would have saved before it is captured while requests wait: several times the rows that
the device could compute meanwhile."""
_SCORED_ROWS = 256
"""Prompt positions whose logits are in memory at once."""


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
        sums: GroupSums | None = None,
        halved: int = HALVED_TOKENS,
        links: StageLinks | None = None,
        long_prompts: PromptAttention | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`graphs`: whether to capture steps, with fused kernels; or what captures them.

        `sums`: of the ranks that share the model.
        `halved`: tokens from which on such ranks compute a pass as two halves; a pipeline's never do.
        `links`: to the other stages of a pipeline, of which `model` is one. `long_prompts`: what attends for them in
        place of flash-attn-4, where attention is flash.
        """
        self.model, self.cache, self.sums, self.links, self.clock = model, cache, sums, links, clock
        self.device, self.max_model_len = cache.data.device, max_model_len
        self.hosted = hosted_layers(model)
        """Layers whose experts the host loads when they are chosen."""
        self.unpadded = bool(self.hosted) or any(experts.peers is not None for experts in model.experts())
        """Whether no step is padded or captured: experts are loaded, or have rows of other ranks, too."""
        self.staging = Staging(self.device)
        self._last: torch.cuda.Event | None = None
        """End of the last step on the device."""
        max_blocks = -(-max_model_len // cache.block_size)
        shapes = pass_shapes(num_seats, min(MOST_TOKENS, max_batch_tokens))
        size = PagedSize(
            max_tokens=max(max_batch_tokens, shapes.largest.tokens),
            max_sequences=shapes.largest.sequences,
            max_blocks=max_blocks,
        )
        long_prompts = choose_prompts(model.ops, attention, cache.data.dtype, long_prompts)
        self.prompts: PromptPlan | None = None
        """Long prompts, where flash-attn-4 attends for them; our kernel then attends for all else."""
        if long_prompts is not None:
            self.prompts = PromptPlan(cache.data, prompt_keys(max_model_len, max_batch_tokens), long_prompts)
            attention = "stoker"
        self.attend = PagedAttend(model.ops, attention, cache, size, prompts=self.prompts)
        self.graphs: StepGraphs | None = None
        self.seats = SeatTables(num_seats, max_model_len, max_blocks, self.staging)
        if model.ops.kernels == "fused":
            self.seats = seats = DeviceSeatTables(num_seats, max_model_len, max_blocks, self.staging)
            capture = self._capture(graphs)
            agree = bool if sums is None else sums.agree
            self.graphs = StepGraphs(model, cache, self.attend, seats, self.staging, shapes, capture, agree)
        halves = None if sums is None or links is not None else halved
        self.eager = EagerPass(model, cache, self.seats, self.staging, self.attend, halves)
        self.tokens_SL, self.values = self.seats.tokens_SL, self.seats.values

    def _capture(self, graphs: bool | Capture) -> Capture | None:
        if not isinstance(graphs, bool):
            return graphs
        return CudaCapture(self.device) if graphs and not self.unpadded and self.device.type == "cuda" else None

    @property
    def num_exchanges(self) -> int:
        """Exchanges with the other ranks so far; graphs count when they are captured."""
        return 0 if self.sums is None else self.sums.calls

    def abort(self) -> None:
        """End the exchanges in which this rank waits for a lost one. For any thread."""
        if self.sums is not None:
            self.sums.abort()
        if self.links is not None:
            self.links.abort()

    def run(self, step: StepInput) -> StepOutput:
        """Compute one step and wait for its output.

        Raises:
            ExecutorLost: seats could not be brought up to date or the device failed; later steps would be wrong.
        """
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> LaunchedStep:
        """Start one step. On the CPU it is done when this returns. Raises as `run`."""
        began_s, rows = self.clock(), step_rows(step)
        begin = None if self.staging.is_host else self.staging.record()
        launched = self._launch(step, rows)
        self._time(launched, rows, begin, began_s)
        return launched

    def _time(self, launched: LaunchedStep, rows: StepRows, begin: torch.cuda.Event | None, began_s: float) -> None:
        way, shape = "eager", (rows.num_tokens, rows.num_decodes)
        if launched.shape is not None and self.graphs is not None:
            way, shape = self.graphs.way, (launched.shape.tokens, launched.shape.decodes)
        launched.timing = StepTiming(way, shape, begin, self._last, self.clock() - began_s)
        self._last = launched.fetched.event

    def _launch(self, step: StepInput, rows: StepRows) -> LaunchedStep:
        if self.links is not None:
            return self._launch_stage(step, rows, self.links)
        self._set_up(step, rows)
        return self._compute(step, rows, None)

    def _set_up(self, step: StepInput, rows: StepRows) -> None:
        others = rows.num_prompts or rows.num_others or step.openings or self.unpadded
        self._apply(step, tables_follow=self.graphs is not None and not others)

    def _compute(self, step: StepInput, rows: StepRows, stream_2TD: Tensor | None) -> LaunchedStep:
        """Compute a step of the whole model, or of a pipeline's last stage."""
        try:
            shape = self._shape(step, rows)
            if self.graphs is None or shape is None:
                return self._finish(step, rows, self.eager.compute(rows, stream_2TD))
            result = self.graphs.compute(shape, rows, stream_2TD)
            launched = self._sampled(step, rows, shape, result) if shape.samples else self._finish(step, rows, result)
            launched.shape = shape
            return launched
        except torch.AcceleratorError as error:
            raise ExecutorLost(f"the device failed in step {step.number}: {error}") from error

    # A stage of a pipeline.

    def _launch_stage(self, step: StepInput, rows: StepRows, links: StageLinks) -> LaunchedStep:
        """Launch a stage's part of a step.

        What fails before the last stage ends the replica: other stages wait for its rows.
        """
        try:
            for write in links.begin(rows, step.openings):
                self._write_tokens(write)
            self._set_up(step, rows)
            stream_2TD = links.receive(rows.num_tokens)
            if not links.is_last:
                return self._pass_on(step, rows, stream_2TD, links)
        except ExecutorLost:
            raise
        except Exception as error:
            raise ExecutorLost(f"stage {links.stage} fails in step {step.number}: {error}") from error
        return self._end_pipeline(step, rows, stream_2TD, links)

    def _end_pipeline(
        self, step: StepInput, rows: StepRows, stream_2TD: Tensor | None, links: StageLinks
    ) -> LaunchedStep:
        """Compute the last stage. After an error, too, the first one gets tokens, so that all can compute another
        step."""
        try:
            return self._compute(step, rows, stream_2TD)
        finally:
            if step.sample_seats:
                links.send_tokens(self._sampled_tokens(rows))

    def _pass_on(self, step: StepInput, rows: StepRows, stream_2TD: Tensor | None, links: StageLinks) -> LaunchedStep:
        """Compute a stage that does not sample and send its rows on."""
        shape = self._shape(step, rows)
        if self.graphs is None or shape is None:
            links.send(self.eager.compute(rows, stream_2TD))
        else:
            left_2TD = self.graphs.compute(shape, rows, stream_2TD)[:, : rows.num_tokens]
            links.send(left_2TD.clone(memory_format=torch.contiguous_format))  # the next step overwrites the buffer
        links.expect_tokens(rows)
        output = StepOutput(step.number, (), (), (), ((),) * len(step.seats))
        launched = LaunchedStep(step.number, self.staging.fetch([]), lambda _: output)
        launched.shape = shape
        return launched

    def _write_tokens(self, write: TokenWrite) -> None:
        """Write tokens that the last stage has sampled to their seats."""
        (targets,) = self.staging.send(write.seats * self.tokens_SL.shape[1] + write.positions)
        self.tokens_SL.view(-1).index_copy_(0, targets, write.tokens)

    def _sampled_tokens(self, rows: StepRows) -> Tensor:
        """Return the step's tokens, which are in their seats' rows."""
        (places,) = self.staging.send(rows.sample_seats * self.tokens_SL.shape[1] + rows.sample_positions)
        return self.tokens_SL.view(-1).index_select(0, places)

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        """Capture the graph of one more shape. False: none is left. `wanted`: only one whose lack has cost much."""
        shape = self.next_capture(wanted=wanted)
        if shape is not None:
            self.capture(shape)
        return shape is not None

    def next_capture(self, *, wanted: bool = False, first: bool = False) -> PassShape | None:
        """The shape to capture next; None: none is left. `first`: of those captured before the first request."""
        if self.graphs is None:
            return None
        if first:
            return self.graphs.missing(self.graphs.shapes.first)
        often = self.graphs.most_wanted(WANTED_ROWS if wanted else 1)
        return self.graphs.missing(often if wanted else chain(often, self.graphs.shapes.order))

    @torch.inference_mode()
    def capture(self, shape: PassShape) -> None:
        """Capture the graph of one shape: on all ranks, between the same two steps."""
        assert self.graphs is not None, "a shape is one of its"
        if self.links is not None and not self.links.is_last:
            shape = shape._replace(samples=False, filtered=False)
            if shape in self.graphs.graphs:
                return
        self.graphs.capture_shape(shape)

    @torch.inference_mode()
    def warm_up_sizes(self) -> None:
        """Compile kernels by steps of padding in every shape, decode shapes with and without the sampler's filters."""
        if self.graphs is None or self.hosted:
            return
        shapes = self.graphs.shapes
        for shape in (*shapes.decodes, *(shape._replace(filtered=True) for shape in shapes.decodes), *shapes.mixed):
            self.graphs.warm_up(shape)

    def _apply(self, step: StepInput, *, tables_follow: bool) -> None:
        """Bring seats, tables and blocks up to date.

        `tables_follow`: new table entries reach the device with the pass's own inputs, so only the host's copy is
        written.
        """
        try:
            self.seats.open(step.openings)
            if tables_follow:
                self.seats.enter_host(step.table)
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

    # Steps padded to a fixed size.

    def _shape(self, step: StepInput, rows: StepRows) -> PassShape | None:
        """The shape whose graph gives what the step's samples request, or from whose hidden states they are drawn."""
        if self.graphs is None or self.unpadded or self._pays_ungraphed(rows):
            return None
        if self.links is not None and not self.links.is_last:
            return self.graphs.shape_for(rows, samples=False, filtered=False)
        if not len(rows.sample_seats) or any(step.scored) or step.masks:
            return self.graphs.shape_for(rows, samples=False, filtered=False)
        plain = self._is_plain(rows)
        return self.graphs.shape_for(rows, samples=plain, filtered=plain and self._is_filtered(rows))

    def _is_plain(self, rows: StepRows) -> bool:
        """Whether no sample needs log-probabilities or changed logits."""
        seats, values = rows.sample_seats, self.values
        return bool(
            (values.top_logprobs[seats] < 0).all() and (values.adjusted_until[seats] <= rows.sample_positions).all()
        )

    def _is_filtered(self, rows: StepRows) -> bool:
        return bool(self.values.filtered[rows.sample_seats].any())

    def _pays_ungraphed(self, rows: StepRows) -> bool:
        """Whether the step's prompts are so long that their attention by flash-attn-4 is worth the launches."""
        if self.prompts is None or not rows.num_prompts:
            return False
        prompts = slice(rows.num_decodes, None)
        return self.prompts.pays_ungraphed(count_pairs(rows.starts[prompts].tolist(), rows.lengths[prompts].tolist()))

    def _sampled(self, step: StepInput, rows: StepRows, shape: PassShape, out_2B: Tensor) -> LaunchedStep:
        places, num_chunks = sample_places(shape, rows), len(step.seats)

        def unpack(arrays: list[np.ndarray]) -> StepOutput:
            tokens, valid = arrays[0][:, places].tolist()
            nothing = (None,) * len(tokens), ((),) * num_chunks
            return StepOutput(step.number, tuple(tokens), tuple(map(bool, valid)), *nothing)

        return LaunchedStep(step.number, self.staging.fetch([out_2B]), unpack)

    # Any other step.

    def _finish(self, step: StepInput, rows: StepRows, hidden_TD: Tensor) -> LaunchedStep:
        """Sample and score from the hidden states, which may have padding at their end."""
        scores = self._score(step, rows, hidden_TD)
        return self._fetch(step, self._sample(rows, hidden_TD, dict(step.masks)), scores)

    def _sample(self, rows: StepRows, hidden_TD: Tensor, masks: Mapping[int, bytes]) -> Sampled | None:
        """Sample next tokens and write them to their seats."""
        num_samples = len(rows.sample_seats)
        if not num_samples:
            return None
        hidden_PD, rows_P, targets_B = self._sampled_rows(rows, hidden_TD)
        if self._deals(rows, len(hidden_PD), masks):
            return self._draw_dealt(hidden_PD, rows_P, targets_B)
        logits_BV = self.model.logits(hidden_PD)[:num_samples]
        asked = Rows(self.values, rows.sample_seats, rows.sample_positions, self.device, masks)
        if self.graphs is not None:
            return self._draw(logits_BV, asked, rows_P)
        sampled = sample(logits_BV, asked, self.tokens_SL, self.model.ops)
        self.tokens_SL.view(-1).index_copy_(0, targets_B, sampled.tokens.to(self.tokens_SL.dtype))
        return sampled

    def _sampled_rows(self, rows: StepRows, hidden_TD: Tensor) -> tuple[Tensor, SampleRows, Tensor]:
        """Return the samples' hidden states, with padding where steps are captured, their rows, and the places of their
        tokens."""
        target_B = rows.sample_seats * self.tokens_SL.shape[1] + rows.sample_positions
        padded = padded_rows if self.graphs is not None else np.asarray
        rows_P, seats_P, positions_P = map(padded, (rows.sample_rows, rows.sample_seats, rows.sample_positions))
        device_rows_P, targets_B, seats, positions = self.staging.send(
            rows_P, target_B, seats_P.astype(np.int32), positions_P.astype(np.int32)
        )
        is_front = np.array_equal(rows_P, np.arange(len(rows_P)))
        hidden_PD = hidden_TD[: len(rows_P)] if is_front else hidden_TD.index_select(0, device_rows_P)
        return hidden_PD, SampleRows(seats, positions, self._is_filtered(rows)), targets_B

    def _deals(self, rows: StepRows, num_rows: int, masks: Mapping[int, bytes]) -> bool:
        """Whether so many rows are dealt to tensor ranks, each of which samples its share."""
        if self.graphs is None or self.sums is None or masks or not deals(num_rows, self.sums.size):
            return False
        return self._is_plain(rows)

    def _draw_dealt(self, hidden_PD: Tensor, rows_P: SampleRows, targets_B: Tensor) -> Sampled:
        """Sample as a graph over tensor ranks does. `targets_B`: places of the tokens, which come before padding."""
        assert isinstance(self.seats, DeviceSeatTables)
        drawn, num_samples = draw(self.model, hidden_PD, rows_P, self.seats.sampling), len(targets_B)
        tokens_B = drawn.tokens[:num_samples]
        self.tokens_SL.view(-1).index_copy_(0, targets_B, tokens_B.to(self.tokens_SL.dtype))
        return Sampled(tokens_B, drawn.valid[:num_samples], None)

    def _draw(self, logits_BV: Tensor, rows: Rows, rows_P: SampleRows) -> Sampled:
        """Sample with the fused sampler; adjustments and log-probabilities only where a row requests them."""
        assert isinstance(self.seats, DeviceSeatTables)
        num_samples = len(logits_BV)
        logprobs_of = raw_logprobs(logits_BV, rows, self.model.ops)
        adjusts = bool((self.values.adjusted_until[rows.seats] > rows.positions).any())
        sampled = self.model.ops.sample(
            mask_logits(logits_BV, rows.seats, rows.masks),
            SampleRows(rows_P.seats[:num_samples], rows_P.positions[:num_samples], rows_P.filtered),
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

    def _score(self, step: StepInput, rows: StepRows, hidden_TD: Tensor) -> list[list[Logprobs]]:
        """Log-probabilities of prompt tokens by chunk, a bounded number of rows of logits at a time."""
        return [
            [
                self._score_rows(step, rows, hidden_TD, chunk, first, min(first + _SCORED_ROWS, scored))
                for first in range(0, scored, _SCORED_ROWS)
            ]
            for chunk, scored in enumerate(step.scored)
        ]

    def _score_rows(
        self, step: StepInput, rows: StepRows, hidden_TD: Tensor, chunk: int, first: int, end: int
    ) -> Logprobs:
        row, start, seat = int(rows.begins[rows.places[chunk]]), step.starts[chunk], step.seats[chunk]
        logprobs_TV = self.model.ops.log_softmax(self.model.logits(hidden_TD[row + first : row + end]))
        followers_T = self.tokens_SL[seat, start + first + 1 : start + end + 1]
        return score(logprobs_TV, followers_T, self.values.params[seat].prompt_logprobs or 0)

    def _fetch(self, step: StepInput, sampled: Sampled | None, scores: list[list[Logprobs]]) -> LaunchedStep:
        """Begin to copy all results to the host."""
        tensors: list[Tensor] = []
        if sampled is not None:
            tensors += (sampled.tokens, sampled.valid, *(sampled.logprobs or ()))
        tensors += [tensor for parts in scores for part in parts for tensor in part]
        has_logprobs = sampled is not None and sampled.logprobs is not None
        wanted = self.values.top_logprobs[list(step.sample_seats)].tolist()
        num_parts = [len(parts) for parts in scores]

        def unpack(arrays: list[np.ndarray]) -> StepOutput:
            return unpacked(step, arrays, wanted if has_logprobs else None, num_parts)

        return LaunchedStep(step.number, self.staging.fetch(tensors), unpack)
