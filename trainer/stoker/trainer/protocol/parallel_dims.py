"""The rank grid `[pipeline, replicate, shard, context, tensor]`: sizes that multiply out to the world, and the place of one rank.

Also the list of what the trainer does not do yet: a configuration that asks for it is refused by name (kernels and attention are refused by `stoker.model.kernels.ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import ParallelismConfig, TrainerConfig

ALLOWED: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "parallelism.tensor": (1,),
        "parallelism.pipeline": (1,),
        "parallelism.expert": (1,),
        "parallelism.context": (1,),
        "parallelism.replicate": (1,),
        "parallelism.sequence_parallel": (False,),
        "optimization.optimizer": ("adam", "adamw"),
        "memory.precision": ("fp32", "bf16"),
        "memory.zero_stage": (0, 1, 2),
        "memory.activation_checkpointing": ("none", "full"),
        "memory.cpu_offload": (False,),
        "memory.nvme_offload": (None,),
        "logging.tensorboard": (None,),
        "logging.wandb": (None,),
        "logging.mlflow": (None,),
    }
)
"""What the trainer can do, of the fields that promise more."""


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
    problems = _limit_problems(config) + _batch_problems(config, mesh)
    if problems:
        raise ConfigError("\n".join(problems))
    return mesh


def _limit_problems(config: TrainerConfig) -> list[str]:
    values = {field: attrgetter(field)(config) for field in ALLOWED}
    return [
        f"not supported yet: {field} {value!r} (allowed now: {_listed(ALLOWED[field])})"
        for field, value in values.items()
        if value not in ALLOWED[field]
    ]


def _listed(allowed: Sequence[object]) -> str:
    return ", ".join("none" if value is None else str(value) for value in allowed)


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
