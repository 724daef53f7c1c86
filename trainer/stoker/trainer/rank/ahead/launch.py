"""Launch what a run launches: a training step and a validation of each stage of the pipeline, on nothing.

The caller has entered `compiling_into`, so a launch compiles. T tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import torch

from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops
from stoker.trainer.errors import NonFinite
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import SourceProgress
from stoker.trainer.protocol.parallel_dims import check_supported
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.ahead.absent_ranks import absent_mesh
from stoker.trainer.rank.ahead.cut import cut_config, cut_model
from stoker.trainer.rank.build import RankContext, make_passes
from stoker.trainer.rank.context_share import share_batches
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.fp8_weights import check_fp8
from stoker.trainer.rank.kernel_choice import DTYPES, make_ops
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.pipeline.slices import Model, empty_model, slices_of
from stoker.trainer.rank.run_inputs import check_heads, check_length, lora_settings
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.train_step import TrainStep
from stoker.trainer.rank.validation import validate
from stoker.trainer.rank.zero_maker import make_zero

ON_GPU = torch.device("cuda", 0)
"""What the run's choices are made for; no tensor is made there."""
ON_HOST = torch.device("cpu")


def launch_kernels(config: TrainerConfig, model: ModelConfig) -> None:
    """Launch the kernels of every rank of a run.

    Ranks of one stage launch the same kernels. Sets torch's deterministic mode, as a rank does at its start.

    Raises:
        ConfigError: the run is not one that a trainer would start; the message names the field.
    """
    dims = check_supported(config)
    check_length(config, model)
    check_heads(config, model)
    check_fp8(config, model, ON_HOST)
    repeat_bitwise(config)
    config, model = cut_config(config, dims), cut_model(model, dims)
    for stage in range(dims.pipeline):
        rank = stage * dims.world_size // dims.pipeline
        with absent_mesh(dims, rank, any_data_parallel=config.training.any_data_parallel) as mesh:
            launch_rank(config, model, mesh)


def repeat_bitwise(config: TrainerConfig) -> None:
    """Set torch's deterministic mode as a rank does at its start, where it is another one: it imports for seconds."""
    wanted = config.training.deterministic != "Off"
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would write each buffer


def launch_rank(config: TrainerConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Launch the kernels of one rank's step, then those of its validation."""
    ops, attention = make_ops(config, ON_GPU)
    length, cuts = config.training.sequence_length, config.parallelism.sequence_parallel
    held = empty_model(
        *(model, ops, mesh.dims, mesh.stage, length, mesh.tensor, cuts, mesh.expert), lora_settings(config)
    )
    zero = make_zero(config, held, mesh, ON_HOST, fill=lambda _: None)
    context = RankContext(mesh=mesh, save_group=SaveGroup(0, 1, None), channel=RankChannel(None), device=ON_HOST)
    # flash-attn-4 is not Triton's. Our own kernels take over where it is not installed, and for uneven documents.
    passes = make_passes(config, context, held, zero, attention="stoker" if attention == "flash" else attention)
    loss_scale = LossScale() if config.memory.precision == "fp16" else None
    step = TrainStep(passes, zero, config.optimization.gradient_clipping, loss_scale)
    batches = share_batches(UnevenBatches(config, model.vocab_size), mesh)
    mine, count = (mesh.data_index, mesh.data_size), mesh.dims.micro_batches_per_rank(config.training)
    with contextlib.suppress(NonFinite):  # whatever is in memory
        step(1, batches.micro_batches(0, *mine), count, batches.target_tokens(0), 1e-4, StepSignals)
    validate(passes, zero, batches.validation(*mine), StepSignals)
    zero.wait_parameters()
    zero.close()
    if mesh.expert is not None:
        launch_few_rows(held, ops, DTYPES[config.memory.precision])


def launch_few_rows(model: Model, ops: Ops, dtype: torch.dtype) -> None:
    """Launch the products of experts that get a row each: how many rows a rank gets is the router's choice."""
    layer = next(layer for decoder in slices_of(model).values() for layer in decoder.experts())
    ends_E = torch.arange(1, len(layer.own) + 1, dtype=torch.int32)
    for weight in (layer.gate_up, layer.down):
        x_SD = torch.empty(len(ends_E), weight.shape[1], dtype=dtype, requires_grad=True)
        held_RD = torch.empty(weight.shape, dtype=dtype, requires_grad=weight.requires_grad)
        y_SO = ops.grouped_linear(x_SD, held_RD, ends_E)
        y_SO.backward(torch.empty_like(y_SO))  # type: ignore[no-untyped-call]


class UnevenBatches:
    """Micro-batches of two documents of different lengths (`loop.Batches`)."""

    def __init__(self, config: TrainerConfig, vocab_size: int) -> None:
        self._training, self._vocab_size = config.training, vocab_size

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:  # noqa: ARG002  all alike
        training = self._training
        return (self._batch() for _ in range(training.global_batch_size // training.micro_batch_size // dp_size))

    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:  # noqa: ARG002  all alike
        return iter([self._batch()])

    def target_tokens(self, step: int) -> int:  # noqa: ARG002  all alike
        return self._training.global_batch_size * self._training.sequence_length

    def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]:  # noqa: ARG002  none is read
        return []

    def cursor(self, step: int) -> dict[str, object]:
        return {"step": step}

    def check(self, cursor: object) -> None:
        """Nothing is resumed."""

    def _batch(self) -> MicroBatch:
        size = self._training.micro_batch_size * self._training.sequence_length
        cut = size // 3 + 1
        tokens_T = np.arange(size) % self._vocab_size
        positions_T = np.concatenate([np.arange(cut), np.arange(size - cut)])
        bounds = np.array([0, cut, size], np.int32)
        return MicroBatch(tokens_T, positions_T, tokens_T, np.ones(size, np.float32), bounds, max(cut, size - cut))
