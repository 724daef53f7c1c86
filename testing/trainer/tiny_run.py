"""A tiny model on synthetic batches, trained through the real loop: shared by the tests of step, saves and resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.checkpoint.store import CheckpointRoot
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.pod.causes import Cause
from stoker.pod.config_file import parse
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import Event, SourceProgress
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.build import RankContext, open_loop
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.initial_weights import InitialWeights
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.mesh import AxisGroups, one_rank_mesh, open_mesh
from stoker.trainer.rank.pipeline.slices import Model
from stoker.trainer.rank.resume import choose_resume
from stoker.trainer.rank.run_inputs import RunInputs, empty_model_of_rank, travelling_files
from stoker.trainer.rank.save_group import SaveGroup, make_save_group

TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=67,
    hidden_size=32,
    intermediate_size=56,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=True,
    max_position_embeddings=64,
    initializer_range=0.2,
)
SMALL = replace(TINY, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=64)
"""A model of which every fused kernel takes the shapes."""


class SyntheticBatches:
    """Random documents in packed sequences; as in the real loader, the order depends on seed and index only."""

    def __init__(self, config: TrainerConfig, vocab_size: int = TINY.vocab_size) -> None:
        self.training = config.training
        self.vocab_size = vocab_size

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        count = self.training.global_batch_size // self.training.micro_batch_size // dp_size
        first = (step * dp_size + dp_rank) * count
        return (self.micro_batch(index) for index in range(first, first + count))

    def micro_batch(self, index: int) -> MicroBatch:
        random = np.random.default_rng([self.training.seed, index])
        size = self.training.micro_batch_size * self.training.sequence_length
        tokens = random.integers(0, self.vocab_size, size + 1)
        cuts = np.unique(np.concatenate([[0, size], random.integers(1, size, 2)])).astype(np.int32)
        positions = np.concatenate([np.arange(length) for length in np.diff(cuts)])
        weights = (random.random(size) < 0.8).astype(np.float32)
        return MicroBatch(tokens[:-1], positions, tokens[1:], weights, cuts, int(np.diff(cuts).max()))

    def target_tokens(self, step: int) -> int:
        return sum(int(batch.weights_T.sum()) for batch in self.micro_batches(step, 0, 1))

    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        return (self.micro_batch(1_000_000 + index) for index in range(dp_rank, 4, dp_size))

    def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]:
        samples = step * self.training.global_batch_size
        return [SourceProgress(name="synthetic", samples=samples, sequences=1000)]

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step, "fingerprint": "synthetic"}

    def check(self, cursor: Mapping[str, Any]) -> None:
        if cursor["fingerprint"] != "synthetic":
            raise DataError(f"another corpus: {cursor}")


class ChainBatches(SyntheticBatches):
    """Documents in which a token nearly always has the same successor, so that a model learns within some steps."""

    def micro_batch(self, index: int) -> MicroBatch:
        batch = super().micro_batch(index)
        tokens, random = batch.tokens_T.copy(), np.random.default_rng([11, self.training.seed, index])
        for place in np.flatnonzero(random.random(len(tokens) - 1) < 0.9):
            tokens[place + 1] = (5 * tokens[place] + 3) % self.vocab_size
        return replace(batch, tokens_T=tokens, targets_T=np.append(tokens[1:], tokens[:1]))


def tiny_config(folder: Path | str = "unused", **changes: Any) -> TrainerConfig:
    """Return the configuration of a tiny run; `section__field=value` changes one field."""
    fields: dict[str, Any] = {
        "job": {"name": "tiny", "uid": "u", "writer": "0a1b2c3d"},
        "termination_log": "unused",
        "work_dir": f"{folder}/work",
        "model": {},
        "training": {
            "total_steps": 6,
            "global_batch_size": 8,
            "sequence_length": 24,
            "deterministic": "AnyDataParallel",
        },
        "optimization": {"learning_rate": 0.01, "warmup_steps": 2},
        "memory": {"precision": "fp32"},
        "data": {"sources": [{"name": "synthetic", "path": "none"}]},
        "checkpoint": {"root": f"{folder}/root"},
    }
    for path, value in changes.items():
        *sections, field = path.split("__")
        section = fields
        for name in sections:
            section = section.setdefault(name, {})
        section[field] = value
    return parse(TrainerConfig, fields)


class RecordingChannel(RankChannel):
    """A channel that keeps events in a list."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)

    def all(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def alone(device: str = "cpu") -> RankContext:
    return RankContext(
        mesh=one_rank_mesh(),
        save_group=SaveGroup(0, 1, None),
        channel=RecordingChannel(),
        device=torch.device(device),
    )


def data_parallel(ranks: int) -> ParallelDims:
    """Return the rank grid of a run with data parallelism alone."""
    return ParallelDims(shard=ranks)


def context_of(
    dims: ParallelDims,
    device: str = "cpu",
    groups: AxisGroups | None = None,
    save_groups: dict[int, SaveGroup | None] | None = None,
    *,
    any_data_parallel: bool = False,
) -> RankContext | None:
    """Return the context of the first ranks of the world; None on the others (collective).

    `groups` and `save_groups` keep what was opened for later calls.
    """
    groups = groups or AxisGroups(torch.device(device))
    mesh = open_mesh(dims, groups, any_data_parallel=any_data_parallel)
    save_groups = {} if save_groups is None else save_groups
    if dims.world_size not in save_groups:
        save_groups[dims.world_size] = make_save_group(range(dims.world_size))
    save_group = save_groups[dims.world_size]
    if mesh is None or save_group is None:
        return None
    return RankContext(
        mesh=mesh,
        save_group=save_group,
        channel=RecordingChannel(),
        device=torch.device(device),
    )


def tiny_decoder(config: TrainerConfig, model: ModelConfig = TINY) -> Decoder:
    """Return a decoder on the CPU, with its initial weights."""
    decoder = Decoder(model, make_ops(config, torch.device("cpu"))[0])
    decoder.init_weights(config.training.seed)
    return decoder


def empty_decoder(config: TrainerConfig, device: torch.device, model: ModelConfig) -> tuple[Decoder, InitialWeights]:
    """Return this rank's part of a decoder and its initialiser: the same numbers on every device."""
    whole = Decoder(model, Ops())
    whole.init_weights(config.training.seed)
    decoder = Decoder(model, make_ops(config, device)[0], device="meta")
    return decoder, InitialWeights(decoder, DecoderStore(whole), lambda _done, _total: None)


def empty_slices(config: TrainerConfig, context: RankContext, model: ModelConfig) -> tuple[Model, InitialWeights]:
    """Return the part of a model that a rank holds, and its initialiser: the same numbers in every layout."""
    whole = Decoder(model, Ops())
    whole.init_weights(config.training.seed)
    held = empty_model_of_rank(config, model, context.mesh, make_ops(config, context.device)[0])
    store, seed = DecoderStore(whole), config.training.seed
    return held, InitialWeights(held, store, lambda _done, _total: None, adapter_seed=seed)


class DecoderStore:
    """A decoder's weights as a store."""

    def __init__(self, decoder: Decoder) -> None:
        self._parts = {part.hf_name: part for part in decoder.named_parts()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: part.global_shape for name, part in self._parts.items()}

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        whole = self._parts[name].local()
        return whole[tuple(slice(begin, begin + extent) for begin, extent in zip(start, size, strict=True))]


def train(
    config: TrainerConfig,
    context: RankContext,
    model: ModelConfig = TINY,
    batches: SyntheticBatches | None = None,
    loss_scale: LossScale | None = None,
) -> Cause:
    """Start or resume a run and run its loop; the events are in `context.channel`."""
    held, start = empty_slices(config, context, model)
    root = CheckpointRoot(Path(config.checkpoint.root))
    resume = choose_resume(config, root, context.save_group, lambda message: context.channel.phase("Loading", message))
    assert config.training.total_steps is not None
    inputs = RunInputs(
        model=held,
        batches=batches or SyntheticBatches(config, min(model.vocab_size, TINY.vocab_size)),
        files=travelling_files(held, config.memory.precision, {}),
        total_steps=config.training.total_steps,
        fingerprint="synthetic",
        initial_weights=start,
    )
    with open_loop(config, root, context, inputs, resume, loss_scale) as loop:
        return loop.train()
