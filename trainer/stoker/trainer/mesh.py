"""The rank grid `[pipeline, replicate, shard, context, tensor]`: sizes that multiply out to the world, and the place of one rank.

Also the list of what the trainer does not do yet: a configuration that asks for it is refused by name (kernels and attention are refused by `stoker.model.kernels.ops`).
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.config_file import ConfigError
from stoker.trainer.config import ParallelismConfig, TrainerConfig


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

    def data_rank(self, rank: int) -> int:
        """Place of global rank `rank` on the data axes."""
        return rank // (self.context * self.tensor) % self.data_parallel


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
    problems = [
        f"not supported yet: {field} {value!r} (allowed now: {allowed})" for field, value, allowed in _limits(config)
    ]
    problems += _batch_problems(config, mesh)
    if problems:
        raise ConfigError("\n".join(problems))
    return mesh


def _limits(config: TrainerConfig) -> list[tuple[str, object, str]]:
    asked: list[tuple[str, object, bool, str]] = [
        ("parallelism.tensor", config.parallelism.tensor, config.parallelism.tensor == 1, "1"),
        ("parallelism.pipeline", config.parallelism.pipeline, config.parallelism.pipeline == 1, "1"),
        ("parallelism.expert", config.parallelism.expert, config.parallelism.expert == 1, "1"),
        ("parallelism.context", config.parallelism.context, config.parallelism.context == 1, "1"),
        ("parallelism.replicate", config.parallelism.replicate, config.parallelism.replicate == 1, "1"),
        (
            "parallelism.sequence_parallel",
            config.parallelism.sequence_parallel,
            not config.parallelism.sequence_parallel,
            "False",
        ),
        (
            "optimization.optimizer",
            config.optimization.optimizer,
            config.optimization.optimizer != "lamb",
            "adam, adamw",
        ),
        ("memory.precision", config.memory.precision, config.memory.precision in ("fp32", "bf16"), "fp32, bf16"),
        ("memory.zero_stage", config.memory.zero_stage, config.memory.zero_stage <= 2, "0, 1, 2"),
        (
            "memory.activation_checkpointing",
            config.memory.activation_checkpointing,
            config.memory.activation_checkpointing != "selective",
            "none, full",
        ),
        ("memory.cpu_offload", config.memory.cpu_offload, not config.memory.cpu_offload, "False"),
        ("memory.nvme_offload", config.memory.nvme_offload, config.memory.nvme_offload is None, "none"),
        ("logging.tensorboard", config.logging.tensorboard, config.logging.tensorboard is None, "none"),
        ("logging.wandb", config.logging.wandb, config.logging.wandb is None, "none"),
        ("logging.mlflow", config.logging.mlflow, config.logging.mlflow is None, "none"),
    ]
    return [(field, value, allowed) for field, value, fits, allowed in asked if not fits]


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
