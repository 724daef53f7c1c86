"""The rank grid `[pipeline, replicate, shard, context, tensor]`: sizes that multiply out to the world, and the place of one rank.

`stoker.pod.capabilities` says what is built; what a machine cannot run (kernels, attention) `stoker.model.kernels.ops` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.capabilities import refusals
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import ParallelismConfig, TrainerConfig


@dataclass(frozen=True)
class Mesh:
    """Axis sizes, outermost first; neighbours in rank order share the innermost axes."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_parallel * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return self.replicate * self.shard


def plan_mesh(parallelism: ParallelismConfig, world_size: int) -> Mesh:
    """The mesh of a world.

    Raises:
        ConfigError: the sizes do not multiply out; the message shows the arithmetic.
    """
    fixed = parallelism.pipeline * parallelism.replicate * parallelism.context * parallelism.tensor
    if world_size % fixed:
        raise ConfigError(
            f"parallelism: pipeline {parallelism.pipeline} x replicate {parallelism.replicate} x context "
            f"{parallelism.context} x tensor {parallelism.tensor} = {fixed} does not divide the {world_size} ranks of the gang"
        )
    return Mesh(
        pipeline=parallelism.pipeline,
        replicate=parallelism.replicate,
        shard=world_size // fixed,
        context=parallelism.context,
        tensor=parallelism.tensor,
    )


def check_supported(config: TrainerConfig) -> Mesh:
    """The mesh, if the trainer can do what the configuration asks for.

    Raises:
        ConfigError: one line per field that is not supported yet or does not fit, with its value.
    """
    mesh = plan_mesh(config.parallelism, config.gang.world_size)
    problems = refusals("trainer", config) + _batch_problems(config, mesh)
    if problems:
        raise ConfigError("\n".join(problems))
    return mesh


def _batch_problems(config: TrainerConfig, mesh: Mesh) -> list[str]:
    training, size = config.training, mesh.data_parallel
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
