"""Layouts of ranks, each a row of a table: a tiny model trained in it, and what one rank gives, for comparison.

`LayoutWorld` starts its processes once. A row runs on the first ranks of the world, through the real loop and its last
save; whole tensors are read from the checkpoint. Each group of ranks is opened once for all rows.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.checkpoint.manifest import Box
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.model.config import ModelConfig
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import StepEvent
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.mesh import AxisGroups
from stoker.trainer.rank.save_group import SaveGroup
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import RecordingChannel, SyntheticBatches, alone, context_of, tiny_config, train

STEPS = 10
SEQUENCES = 8
"""Of a global batch, one for each rank of the world."""
ROW_S = 400.0
"""Limit for one row on a busy machine."""
TOLERANCE = 1e-6
"""Largest ||difference|| / ||reference|| after `STEPS` steps in fp32: of a loss, a weight, a sum of gradients."""
MOMENT_TOLERANCE = 2e-6
"""The same of a sum of squared gradients, whose error is twice theirs, and of the gradients of q and k before softmax,
which are sums that nearly cancel. That is fp32's own rounding: against fp64 the first gradient of one rank differs by
up to 0.9e-6 in q's projection, 1.0e-6 in k's, 1.7e-6 and 1.1e-6 in their norms (six seeds), and by 0.7e-6 in v's.
"""
ADAPTER_TOLERANCE = 5e-6
"""The same of an adapter, which is nothing but a sum of such updates, and of its moments."""
ADAPTER_EPSILON = 1e-4
"""Of the optimizer for adapters. Some of their gradients nearly cancel, and Adam divides them by their own size: with a
smaller epsilon the rounding of such a gradient, another on each kind of processor, becomes a step of the weight.
"""
EXPERT_ADAPTER_TOLERANCE = 2e-5
"""The same of an adapter of an expert, which few tokens reach."""
MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    tie_embeddings=False,
    max_position_embeddings=64,
    initializer_range=0.1,
)
TIED = replace(MODEL, tie_embeddings=True)
SPARSE = replace(
    MODEL,
    architecture="qwen3-moe",
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=32,
    router_aux_loss_coef=0.01,
    router_z_loss_coef=0.001,
)
MIXED = replace(SPARSE, mlp_only_layers=(0,), norm_topk_prob=False)
"""A dense layer and one with experts."""
WINDOWED = replace(MODEL, architecture="mistral", sliding_window=9)
DEEP_SPARSE = replace(SPARSE, num_layers=4)
DEEP = replace(MODEL, num_layers=4)
"""For pipelines of up to four stages."""

Routing = tuple[tuple[int, ...], float, float]
"""Rows of each expert, load-balance loss and z loss of a step."""
State = dict[str, NDArray[np.float32]]
"""Whole tensors of a checkpoint by name: `model.NAME`, `optimizer.exp_avg.NAME`, ..."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row: sizes of the axes, and further fields of the trainer's configuration (`section__field`)."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    stages: int = 1
    """Of each rank of a pipeline."""
    zero_stage: int = 1
    recompute: bool = False
    micro_batch: int = 1
    """Sequences in one micro-batch."""
    model: ModelConfig = MODEL
    lora: bool = False
    """Train adapters beside the frozen model."""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> ParallelDims:
        names = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
        return ParallelDims(**{name: getattr(self, name) for name in names}, stages_per_rank=self.stages)

    @property
    def enough_sequences(self) -> int:
        """The smallest global batch that trains all of the row: every rank of data adds up two micro-batches, one that
        is alone or in a pipeline four. Never more than `SEQUENCES`.
        """
        data = self.replicate * self.shard
        return min(SEQUENCES, (4 if data == 1 or self.pipeline > 1 else 2) * self.micro_batch * data)

    def __str__(self) -> str:
        """Its name in the output of tests."""
        names = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
        sizes = [f"{name}{getattr(self, name)}" for name in (*names, "stages") if getattr(self, name) > 1]
        extra = [f"{name.split('__')[-1]}={value}" for name, value in self.changes.items()]
        recompute = ["recompute"] if self.recompute else []
        kind = ["tied"] if self.model.tie_embeddings else []
        kind += ["window"] if self.model.sliding_window else []
        kind += ["experts"] if self.model.expert_layers else []
        kind += ["mixed"] if self.model.mlp_only_layers else []
        kind += ["odd"] if self.model.vocab_size % 2 else []
        kind += ["lora"] if self.lora else []
        return "-".join([*sizes, f"zero{self.zero_stage}", *recompute, f"micro{self.micro_batch}", *kind, *extra])

    def config(self, folder: Path | str, **changes: Any) -> TrainerConfig:
        """The configuration of a run in this layout."""
        names = ("pipeline", "replicate", "context", "tensor", "expert")
        fields: dict[str, Any] = {f"parallelism__{name}": getattr(self, name) for name in names}
        fields |= {
            "parallelism__stages_per_rank": self.stages,
            "gang__ranks_per_node": self.dims.world_size,
            "training__total_steps": STEPS,
            "training__sequence_length": 32,
            "training__global_batch_size": SEQUENCES,
            "training__micro_batch_size": self.micro_batch,
            "training__deterministic": "Off",
            "memory__zero_stage": self.zero_stage,
            "memory__activation_checkpointing": "full" if self.recompute else "none",
            "optimization__learning_rate": 1e-3,
            "optimization__epsilon": 1e-6,
            "optimization__schedule": "constant",
        }
        fields |= {**LORA, "optimization__epsilon": ADAPTER_EPSILON} if self.lora else {}
        return tiny_config(folder, **{**fields, **self.changes, **changes})


LORA: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8},
    "model": None,
    "model_from": {"kind": "huggingFace", "path": "the test has the weights"},
}
"""A run that trains adapters."""


@dataclass(frozen=True)
class Result:
    """One run: (step, loss, gradient norm) of each step, and the state that its last save holds."""

    losses: list[tuple[int, float, float]]
    state: State
    routing: list[Routing]
    """Of each step; empty for a model without experts."""


def run_alone(layout: Layout, folder: Path | str, **changes: Any) -> Result:
    """Run the row's training on one rank of this process."""
    context = alone()
    train_layout(replace(layout, **ONE, zero_stage=1, recompute=False, changes={}), context, folder, changes)
    return Result(losses_of(context), read_state(folder), routing_of(context))


ONE: dict[str, Any] = dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor", "expert", "stages"), 1)


@cache
def reference(model: ModelConfig, micro_batch: int = 1, lora: bool = False, sequences: int = SEQUENCES) -> Result:
    """What one rank gives for a model, in the plainest layout. `sequences`: of a global batch."""
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(model=model, micro_batch=micro_batch, lora=lora)
        return run_alone(layout, folder, training__global_batch_size=sequences)


class MotifBatches(SyntheticBatches):
    """Documents that repeat a motif: every parameter gets a gradient that is far above the rounding of its sum."""

    def micro_batch(self, index: int) -> MicroBatch:
        batch = super().micro_batch(index)
        motifs_ST = np.random.default_rng([7, index]).integers(0, self.vocab_size, (len(batch.cu_seqlens), 3))
        documents_T = np.searchsorted(batch.cu_seqlens, np.arange(len(batch.tokens_T)), side="right") - 1
        tokens_T = motifs_ST[documents_T, batch.positions_T % 3]
        targets_T = motifs_ST[documents_T, (batch.positions_T + 1) % 3]
        return replace(batch, tokens_T=tokens_T, targets_T=targets_T)


def train_layout(layout: Layout, context: RankContext, folder: Path | str, changes: Mapping[str, Any]) -> None:
    """Train the row on this rank."""
    config = layout.config(folder, **changes)
    train(config, context, layout.model, MotifBatches(config, layout.model.vocab_size))


def read_state(folder: Path | str) -> State:
    """The newest checkpoint below the run's folder, whole; proves that its pieces cover each tensor once."""
    found = CheckpointRoot(Path(folder) / "root").committed()[0]
    checked = verify(found.path, found.digest)
    assert checked.ok, checked.problems
    reader = CheckpointReader(found.path, found.digest)
    return {
        name: np.asarray(reader.read(name, Box.whole(info.shape), (0, math.prod(info.shape)))).reshape(info.shape)
        for name, info in reader.manifest.tensors.items()
    }


def check_bits_across_saves(folder: Path, precision: str, changes: Mapping[str, Any], **always: Any) -> None:
    """Assert that a setting changes no bit of a run, whether it is on or off when the run goes on from a save."""

    def run(name: str, **fields: Any) -> list[float]:
        config = tiny_config(folder / name, memory__precision=precision, **always, **fields)
        context = alone()
        train(config, context, MODEL, SyntheticBatches(config, MODEL.vocab_size))
        assert isinstance(context.channel, RecordingChannel)
        return [event.loss for event in context.channel.all(StepEvent)]

    plain = run("plain", training__total_steps=4)
    parts = run("parts", training__total_steps=2, **changes)
    parts += run("parts", training__total_steps=3)
    parts += run("parts", training__total_steps=4, **changes)
    assert parts == plain
    expected = read_state(folder / "plain")
    assert relative_difference(read_state(folder / "parts"), expected) == dict.fromkeys(expected, 0.0)


def relative_difference(got: State, expected: State) -> dict[str, float]:
    """||difference|| / ||reference|| of every tensor; a missing or extra one is an error."""
    assert got.keys() == expected.keys()
    return {
        name: float(np.linalg.norm(got[name].astype(np.float64) - value)) / max(float(np.linalg.norm(value)), 1e-30)
        for name, value in expected.items()
    }


class LayoutWorld:
    """Gloo ranks for all rows; a row uses the first of them."""

    def __init__(self, size: int = 8) -> None:
        self._world = RankWorld(size, open_groups, start_s=600.0)

    def run(self, layout: Layout, folder: Path | str, **changes: Any) -> Result:
        """Train the row. Every rank must report the same losses."""
        answers = self._world.call(run_row, layout, str(folder), changes, timeout_s=ROW_S)[: layout.dims.world_size]
        assert answers == [answers[0]] * len(answers)
        losses, routing = answers[0]
        return Result(losses, read_state(folder), routing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.__exit__(kind, error, trace)


@dataclass(frozen=True)
class OpenGroups:
    """What a rank of the world keeps between rows."""

    axes: AxisGroups
    saves: dict[int, SaveGroup | None]


def open_groups(_rank: int, _size: int) -> OpenGroups:
    return OpenGroups(AxisGroups(torch.device("cpu")), {})


def run_row(held: OpenGroups, layout: Layout, folder: str, changes: dict[str, Any]) -> Any:
    """Train the row on this rank; None where the row does not use it."""
    ordered = layout.config(folder, **changes).training.any_data_parallel
    context = context_of(layout.dims, groups=held.axes, save_groups=held.saves, any_data_parallel=ordered)
    if context is None:
        return None
    train_layout(layout, context, folder, changes)
    return losses_of(context), routing_of(context)


def losses_of(context: RankContext) -> list[tuple[int, float, float]]:
    assert isinstance(context.channel, RecordingChannel)
    return [(event.step, event.loss, event.grad_norm) for event in context.channel.all(StepEvent)]


def routing_of(context: RankContext) -> list[Routing]:
    assert isinstance(context.channel, RecordingChannel)
    return [
        (event.expert_tokens, event.router_balance_loss, event.router_z_loss)
        for event in context.channel.all(StepEvent)
        if event.expert_tokens is not None
    ]
