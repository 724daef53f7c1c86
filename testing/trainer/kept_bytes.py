"""The bytes that a forward pass keeps for backward on a rank, beside what the plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.context_cut import ContextCut
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.pod.pipeline.actions import Kind
from stoker.pod.pipeline.schedules import compute_order
from stoker.pod.plan.layer_choice import beside_layers, layer_choices, layer_cost
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.stage import pipeline_shape, stage_layers
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.attend_maker import AttendMaker
from stoker.trainer.rank.build import RankContext, make_passes
from stoker.trainer.rank.context_share import own_tokens
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.initial_weights import InitialWeights
from stoker.trainer.rank.kernel_choice import DTYPES, make_ops
from stoker.trainer.rank.pipeline.slices import Slices, empty_model
from stoker.trainer.rank.pipeline.stage import Stage, StageInputs
from stoker.trainer.rank.pipeline.stage_maker import make_stage, stage_again
from stoker.trainer.rank.plan_check import planned_job
from stoker.trainer.rank.router_meter import RouterMeter
from stoker.trainer.rank.run_inputs import lora_settings
from stoker.trainer.rank.train_step import ForwardPass
from stoker.trainer.rank.zero import Zero
from stoker.trainer.rank.zero_maker import is_complete_early, make_zero
from testing.trainer.live_bytes import LiveBytes
from testing.trainer.tiny_run import DecoderStore, alone, empty_slices


@dataclass(frozen=True)
class Kept:
    """Of one micro-batch on one rank."""

    loss: float
    measured: int
    """Bytes; what the plan counts as buffers is left out: what the loss keeps, and copies of weights in fp8."""
    planned: float
    gradient: float
    """Sum of the squares of this rank's reduced gradient."""


def one_document(config: TrainerConfig, model: ModelConfig) -> MicroBatch:
    """A micro-batch of one document."""
    length = config.training.sequence_length
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, length + 1)
    bounds = np.array([0, length], np.int32)
    return MicroBatch(tokens[:-1], np.arange(length), tokens[1:], np.ones(length, np.float32), bounds, length)


def share_of(batch: MicroBatch, context: RankContext) -> MicroBatch:
    """The tokens of one rank of `context`."""
    ranks, rank = context.mesh.dims.context, context.mesh.dims.coordinates(context.mesh.rank).context
    if ranks == 1:
        return batch
    own = own_tokens(ContextCut(len(batch.tokens_T), ranks), rank)
    names = ("tokens_T", "positions_T", "targets_T", "weights_T")
    return replace(batch, **{name: getattr(batch, name)[own] for name in names}, whole_targets=batch.num_targets)


def kept_by_forward(config: TrainerConfig, context: RankContext, model: ModelConfig) -> Kept:
    """Run both passes of a micro-batch and measure what is kept between them."""
    held, start = empty_slices(config, context, model)
    assert isinstance(held, Decoder)
    zero = make_zero(config, held, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, held, zero)
    assert isinstance(forward, ForwardPass)
    batch = share_of(one_document(config, model), context)
    aux = forward.new_meter().new_aux(1.0)
    zero.begin_step(2)
    with LiveBytes() as live:
        held.rope.on(torch.device("cpu"))
        for parameter in held.parameters():
            parameter.detach()  # so that the weights count before the pass
        before = live.now
        loss_sum = forward.loss_sum(batch, 1.0, aux)
        kept = live.settled() - before
    loss_sum.backward()
    forward.end_backward()
    zero.end_micro_batch()
    zero.end_micro_batch()
    zero.finish_reduce()
    gradient = sum(float(state.squares.sum()) for state in zero.states)
    zero.close()
    job = planned_job(config, model)
    choices = zip(layer_jobs(job), layer_choices(job), strict=True)
    planned = job.tokens * (sum(layer_cost(kind, one).kept for kind, one in choices) + beside_layers(job))
    table = 0 if config.lora is not None else 4 * model.vocab_size * model.hidden_size // config.parallelism.tensor
    buffers = table + 16 * job.tokens + eight_bit_copies(config, held)
    return Kept(float(loss_sum.detach()), kept - buffers, planned, gradient)


def eight_bit_copies(config: TrainerConfig, decoder: Decoder) -> int:
    """Return the bytes of the copies of the layers' weights in fp8, one in each order."""
    matrices = [weight for weight in decoder.blocks.parameters() if weight.dim() == 2]
    return 2 * sum(weight.numel() for weight in matrices) if config.memory.precision == "fp8" else 0


def kept_by_stage(
    config: TrainerConfig, model: ModelConfig, number: int, in_flight: int
) -> tuple[int, int, list[float]]:
    """Run a stage of a pipeline of two in this process.

    Return the bytes that `in_flight` micro-batches keep, its planned layers, and the squares of its gradient.
    """
    context = alone()
    layers = stage_layers(planned_job(config, model))[number]
    whole = Decoder(model, Ops())
    whole.init_weights(0)
    decoder = Decoder(model, make_ops(config, context.device)[0], layers=layers, device="meta")
    start = InitialWeights(Slices({number: decoder}), DecoderStore(whole), lambda _done, _total: None)
    zero = make_zero(config, Slices({number: decoder}), context.mesh, context.device, start.fill)
    stage = make_stage(number, decoder, zero, "OneFOneB", False, stage_again(config, number, decoder, zero))
    batch = one_document(config, model)
    attend = AttendMaker(decoder.ops, "sdpa", context.device)
    tokens, hidden = len(batch.tokens_T), model.hidden_size
    received = None if number == 0 else torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(5))
    zero.begin_step(in_flight)
    with LiveBytes() as live:
        decoder.rope.on(torch.device("cpu"))
        for parameter in decoder.parameters():
            parameter.detach()  # so that the weights count before the passes
        before = live.now
        for index in range(in_flight):
            stage.forward(index, inputs_of(batch, attend), received)
        kept = live.now - before
    for index in range(in_flight):
        stage.backward(index, None if decoder.is_last else torch.ones(tokens, hidden))
    zero.finish_reduce()
    squares = [float(state.squares.sum()) for state in zero.states]
    zero.close()
    return kept, len(layers), squares


def kept_by_late_stage(
    config: TrainerConfig, model: ModelConfig, number: int, context: RankContext | None = None
) -> tuple[int, list[float]]:
    """Run the passes of one rank of a zero-bubble pipeline of two in this process, in the order of its schedule.

    `context`: of the ranks that share the stage; None: of one alone. Return the most bytes that it keeps after a pass,
    and the squares of its gradient.
    """
    context, job = context or alone(), planned_job(config, model)
    stage, zero, tokens = late_stage(config, model, number, context)
    decoder, batch = stage.decoder, one_document(config, model)
    attend = AttendMaker(decoder.ops, "sdpa", context.device)
    meter = RouterMeter(model, decoder.layers, context.device)
    noise, shape = torch.Generator().manual_seed(5), (tokens, model.hidden_size)
    dtype = DTYPES[config.memory.precision]
    with LiveBytes() as live:
        zero.begin_step(job.micro_batches)  # so that the sums of gradients count before the passes
        decoder.rope.on(torch.device("cpu"))
        for parameter in decoder.parameters():
            parameter.detach()  # so that the weights count before the passes
        most, before = 0, live.now
        for kind, _, index in compute_order("ZeroBubble", pipeline_shape(job))[number]:
            if kind is Kind.FORWARD:
                received = None if number == 0 else torch.randn(shape, generator=noise, dtype=dtype)
                stage.forward(index, inputs_of(batch, attend, meter.new_aux(1.0)), received)
                del received
            elif kind is Kind.BACKWARD_INPUT:
                stage.backward_input(index, None if decoder.is_last else torch.ones(shape, dtype=dtype))
            else:
                stage.backward_weight(index)
            if live.now - before > most:
                most = max(most, (live.now if context.mesh.tensor is None else live.settled()) - before)
    zero.finish_reduce()
    squares = [float(state.squares.sum()) for state in zero.states]
    zero.close()
    return most, squares


def late_stage(config: TrainerConfig, model: ModelConfig, number: int, context: RankContext) -> tuple[Stage, Zero, int]:
    """Return a stage of a zero-bubble pipeline of two, its state, and the tokens of a rank."""
    mesh, length, cut = context.mesh, config.training.sequence_length, config.parallelism.sequence_parallel
    whole, lora = Decoder(model, Ops()), lora_settings(config)
    whole.init_weights(0)
    ops, dims = make_ops(config, context.device)[0], replace(mesh.dims, pipeline=2)
    held = empty_model(model, ops, dims, number, length, mesh.tensor, cut, mesh.expert, lora)
    assert isinstance(held, Slices)
    start = InitialWeights(held, DecoderStore(whole), lambda _done, _total: None, adapter_seed=0)
    zero = make_zero(config, held, mesh, context.device, start.fill)
    for state in zero.states:
        state.bucket.is_late = not is_complete_early(state.bucket)
    decoder = held.decoders[number]
    stage = make_stage(number, decoder, zero, "ZeroBubble", False, stage_again(config, number, decoder, zero))
    for state in zero.states:
        state.bucket.stage = number
    return stage, zero, length // (mesh.dims.tensor if cut else 1)


def inputs_of(batch: MicroBatch, attend: AttendMaker, aux: Aux | None = None) -> StageInputs:
    """A micro-batch as the stages of a rank have it."""
    names = ("tokens_T", "positions_T", "targets_T", "weights_T")
    tensors: Any = {name: torch.from_numpy(getattr(batch, name)) for name in names}
    return StageInputs(**tensors, attend=attend.of(batch), rows=len(batch.tokens_T), aux=aux)
