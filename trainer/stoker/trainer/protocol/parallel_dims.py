"""The sizes of the rank grid `[pipeline, replicate, shard, context, tensor]`: validated once, then passed down.

`stoker.pod.capabilities` states what is built; `stoker.model.kernels.ops` refuses what a machine cannot run (kernels,
attention). Communicators, loop, data loader and manifests take a `ParallelDims`; nothing else in the trainer computes
the size of an axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Self

from stoker.pod.capabilities import refusals
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import ParallelismConfig, TrainerConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Axis sizes, outermost first: ranks with neighbouring numbers differ on the innermost axes."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @classmethod
    def from_config(cls, parallelism: ParallelismConfig, world_size: int) -> Self:
        """The sizes that the configuration gives; `shard` is what remains of the world.

        Raises:
            ConfigError: the sizes do not multiply out; the message shows the arithmetic.
        """
        fixed = parallelism.pipeline * parallelism.replicate * parallelism.context * parallelism.tensor
        if world_size % fixed:
            raise ConfigError(
                f"parallelism: pipeline {parallelism.pipeline} x replicate {parallelism.replicate} x context "
                f"{parallelism.context} x tensor {parallelism.tensor} = {fixed} does not divide the {world_size} "
                "ranks of the gang"
            )
        return cls(
            pipeline=parallelism.pipeline,
            replicate=parallelism.replicate,
            shard=world_size // fixed,
            context=parallelism.context,
            tensor=parallelism.tensor,
        )

    @property
    def world_size(self) -> int:
        """All ranks of the gang."""
        return self.pipeline * self.data_parallel * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return self.replicate * self.shard

    def data_parallel_groups(self) -> list[tuple[int, ...]]:
        """Global ranks of each group whose members hold the same parameters and see different data."""
        inner = self.context * self.tensor
        stride = self.data_parallel * inner
        return [
            tuple(stage * stride + index * inner + offset for index in range(self.data_parallel))
            for stage, offset in product(range(self.pipeline), range(inner))
        ]

    def micro_batches_per_rank(self, training: TrainingConfig) -> int:
        """How many micro-batches of one step each rank trains;

        `check_supported` has made sure that they share out evenly.
        """
        return training.global_batch_size // training.micro_batch_size // self.data_parallel


def check_supported(config: TrainerConfig) -> ParallelDims:
    """The sizes of the rank grid, if the trainer can do what the configuration asks for.

    Raises:
        ConfigError: one line per field that is not supported yet or does not fit, with its value.
    """
    dims = ParallelDims.from_config(config.parallelism, config.gang.world_size)
    problems = refusals("trainer", config) + _batch_problems(config, dims)
    if problems:
        raise ConfigError("\n".join(problems))
    return dims


def _batch_problems(config: TrainerConfig, dims: ParallelDims) -> list[str]:
    training, size = config.training, dims.data_parallel
    rows = size * training.micro_batch_size
    problems = []
    if training.global_batch_size % rows:
        problems.append(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of {size} data-parallel ranks "
            f"x micro_batch_size {training.micro_batch_size} = {rows}"
        )
    if training.deterministic == "AnyDataParallel" and size & (size - 1):
        problems.append(
            f"training.deterministic AnyDataParallel needs a power of two of data-parallel ranks, got {size}"
        )
    return problems
