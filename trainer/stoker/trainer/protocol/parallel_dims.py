"""The rank grid `[pipeline, replicate, shard, context, tensor]`: sizes, coordinates and groups, validated once.

Experts lie over `shard x tensor`. `ParallelDims` is pure arithmetic on rank numbers; `stoker.trainer.rank.mesh` opens
communicators by it, and communicators, loop, data loader and manifests take that mesh. Nothing else in the trainer
computes the size of an axis or the number of a rank on it.

`stoker.pod.capabilities` states what is built; `stoker.model.kernels.ops` refuses what a machine cannot run (kernels,
attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Self

from stoker.pod.capabilities import refusals
from stoker.pod.config_file import ConfigError
from stoker.pod.pipeline.schedules import check_schedule
from stoker.pod.plan.layout_rules import problems_of_sums
from stoker.trainer.protocol.config import ParallelismConfig, TrainerConfig, TrainingConfig

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first: ranks with neighbouring numbers differ on the innermost axes."""
LEADER = 0
"""The global rank that logs, times saves and commits checkpoints."""

Ranks = tuple[int, ...]


class Coordinates(NamedTuple):
    """The place of one rank on every axis."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


ORIGIN = Coordinates(0, 0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Axis sizes of the rank grid, and the size of an expert group."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Ranks that share one set of experts: neighbours within `shard x tensor`."""
    stages_per_rank: int = 1
    """Runs of layers that each rank of a pipeline holds."""

    @classmethod
    def from_config(cls, parallelism: ParallelismConfig, world_size: int) -> Self:
        """The sizes that the configuration gives; `shard` is what remains of the world.

        Raises:
            ConfigError: the sizes do not multiply out; the message shows the arithmetic.
        """
        sizes = parallelism
        fixed = sizes.pipeline * sizes.replicate * sizes.context * sizes.tensor
        if world_size % fixed:
            raise ConfigError(
                f"parallelism: pipeline {sizes.pipeline} x replicate {sizes.replicate} x context {sizes.context} x "
                f"tensor {sizes.tensor} = {fixed} does not divide the {world_size} ranks of the gang"
            )
        shard = world_size // fixed
        if shard * sizes.tensor % sizes.expert:
            raise ConfigError(
                f"parallelism.expert {sizes.expert} does not divide shard {shard} x tensor {sizes.tensor} = "
                f"{shard * sizes.tensor}, the ranks that experts lie over"
            )
        return cls(
            pipeline=sizes.pipeline,
            replicate=sizes.replicate,
            shard=shard,
            context=sizes.context,
            tensor=sizes.tensor,
            expert=sizes.expert,
            stages_per_rank=sizes.stages_per_rank,
        )

    @property
    def world_size(self) -> int:
        """All ranks of the gang."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different sequences. The ranks of `context` share theirs."""
        return self.replicate * self.shard

    def size(self, *axes: Axis) -> int:
        """Number of ranks that differ on these axes alone."""
        count = 1
        for axis in axes:
            count *= getattr(self, axis)
        return count

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank.

        Raises:
            ValueError: the grid has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of {self}")
        found = []
        for axis in reversed(AXES):
            rank, index = divmod(rank, getattr(self, axis))
            found.append(index)
        return Coordinates(*reversed(found))

    def rank_at(self, place: Coordinates) -> int:
        """The global rank at a place."""
        rank = 0
        for axis in AXES:
            rank = rank * int(getattr(self, axis)) + getattr(place, axis)
        return rank

    def group_of(self, rank: int, *axes: Axis) -> Ranks:
        """The ranks that differ from `rank` on these axes alone; the first axis given varies slowest."""
        return self._group_at(self.coordinates(rank), axes)

    def groups(self, *axes: Axis) -> list[Ranks]:
        """All groups of ranks that differ on these axes alone, in the order of their lowest rank."""
        others = [axis for axis in AXES if axis not in axes]
        corners = product(*(range(getattr(self, axis)) for axis in others))
        return [self._group_at(ORIGIN._replace(**dict(zip(others, place, strict=True))), axes) for place in corners]

    def _group_at(self, here: Coordinates, axes: Sequence[Axis]) -> Ranks:
        choices = product(*(range(getattr(self, axis)) for axis in axes))
        return tuple(self.rank_at(here._replace(**dict(zip(axes, place, strict=True)))) for place in choices)

    def expert_groups(self) -> list[Ranks]:
        """The groups that share one set of experts: runs of `expert` neighbours in each group over shard x tensor."""
        return [
            ranks[start : start + self.expert]
            for ranks in self.groups("shard", "tensor")
            for start in range(0, len(ranks), self.expert)
        ]

    def expert_replicas(self, *, replicates: bool = True) -> list[Ranks]:
        """The groups of ranks that hold the same experts and see other tokens.

        `replicates` tells whether they span the replicate axis.
        """
        axes: tuple[Axis, ...] = ("context", "replicate", "shard", "tensor")
        outer = self.groups(*axes) if replicates else self.groups(*(axis for axis in axes if axis != "replicate"))
        index = {rank: place for ranks in self.expert_groups() for place, rank in enumerate(ranks)}
        return [
            tuple(rank for rank in ranks if index[rank] == place) for ranks in outer for place in range(self.expert)
        ]

    def data_index(self, rank: int) -> int:
        """Number of the rank's share of each global batch, below `data_parallel`."""
        place = self.coordinates(rank)
        return place.replicate * self.shard + place.shard

    def loss_ranks(self) -> Ranks:
        """The ranks whose losses add up to that of the global batch, each part once, in the order of the data."""
        return self._group_at(ORIGIN._replace(pipeline=self.pipeline - 1), ("replicate", "shard", "context"))

    def leads(self, rank: int) -> bool:
        """Whether this rank logs, times saves and commits checkpoints."""
        return rank == LEADER

    def layout(self) -> dict[str, int]:
        """The sizes as a manifest states them."""
        return {
            "world_size": self.world_size,
            "data_parallel": self.data_parallel,
            **{axis: getattr(self, axis) for axis in ("pipeline", "replicate", "context", "tensor", "expert")},
        }

    def micro_batches_per_rank(self, training: TrainingConfig) -> int:
        """The number of micro-batches of one step that each rank trains.

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
    problems += _token_problems(config, dims) + _pipeline_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return dims


def _batch_problems(config: TrainerConfig, dims: ParallelDims) -> list[str]:
    training, size = config.training, dims.data_parallel
    rows = size * training.micro_batch_size
    problems = []
    if training.global_batch_size % rows:
        problems.append(
            f"training.globalBatchSize {training.global_batch_size} is not a multiple of microBatchSize "
            f"{training.micro_batch_size} x data-parallel size {size} = {rows}"
        )
    if training.any_data_parallel:
        sizes = {name: getattr(dims, name) for name in ("data_parallel", "tensor", "context", "expert")}
        problems += [f"training.{line}" for line in problems_of_sums(**sizes)]
    return problems


def _token_problems(config: TrainerConfig, dims: ParallelDims) -> list[str]:
    """Context parallelism cuts sequences; sequence and expert parallelism cut what is left of a micro-batch evenly
    over the ranks of `tensor`.
    """
    training = config.training
    if training.sequence_length % dims.context:
        return [
            f"training.sequenceLength {training.sequence_length} is not a multiple of parallelism.context "
            f"{dims.context}"
        ]
    tokens = training.micro_batch_size * training.sequence_length
    cuts = config.parallelism.sequence_parallel or dims.expert > 1
    if not cuts or tokens % (dims.context * dims.tensor) == 0:
        return []
    field = "sequenceParallel" if config.parallelism.sequence_parallel else f"expert {dims.expert}"
    return [
        f"parallelism.{field}: training.microBatchSize {training.micro_batch_size} x sequenceLength "
        f"{training.sequence_length} = {tokens} tokens are not a multiple of context {dims.context} x tensor "
        f"{dims.tensor} = {dims.context * dims.tensor}"
    ]


def _pipeline_problems(config: TrainerConfig) -> list[str]:
    parallelism = config.parallelism
    try:
        check_schedule(parallelism.pipeline_schedule, parallelism.stages_per_rank)
    except ValueError as error:
        return [f"parallelism: {error}"]
    if parallelism.pipeline == 1:
        several = parallelism.stages_per_rank > 1
        return ["parallelism.stagesPerRank above 1 needs parallelism.pipeline above 1"] if several else []
    if parallelism.pipeline_schedule == "Interleaved" and parallelism.stages_per_rank == 1:
        return ["parallelism.pipelineSchedule Interleaved needs parallelism.stagesPerRank above 1, got 1"]
    return []
