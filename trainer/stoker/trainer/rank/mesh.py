"""The mesh of one rank: its place in the grid, and a communicator or process group for each axis that is cut.

Made once by `main`, in the same order on every rank; every part of a rank that communicates takes it. An axis of size
one costs nothing: its communicator is `Alone`, its process group None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.trainer.protocol.parallel_dims import ParallelDims, Ranks
from stoker.trainer.rank.bucket import Cut, Reduction
from stoker.trainer.rank.communicator import Alone, Communicator, Hybrid, OrderedHybrid, dist_rank, make_communicator
from stoker.trainer.rank.host_group import new_host_group
from stoker.trainer.rank.pipeline.link import NO_LINKS, HostLink, Links, open_links


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """The grid as one rank sees it. Communicators are for flat buffers and numbers, process groups for layers."""

    dims: ParallelDims
    rank: int
    """Global rank."""
    world: Communicator
    """All ranks: signals, losses, the last sum of the gradient norm."""
    gradient: Communicator
    """Reduction `dense`: replicate x shard x context. State is sharded over shard x context."""
    replicated_gradient: Communicator
    """Reduction `replicated`: the same with the ranks of `tensor`, over which state is sharded too."""
    expert_gradient: Communicator
    """Reduction `expert`."""
    tensor: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None
    links: Links = NO_LINKS
    """Channels to the neighbours of the pipeline."""
    first_links: Links | None = None
    """Channels of the first passes on GPUs."""

    def reduction(self, kind: Reduction) -> Communicator:
        """The communicator that sums the gradients of this kind of parameter and shards its state."""
        return {"dense": self.gradient, "replicated": self.replicated_gradient, "expert": self.expert_gradient}[kind]

    @property
    def cuts(self) -> dict[Reduction, Cut]:
        """The cut of the state of each kind of parameter."""
        kinds: tuple[Reduction, ...] = ("dense", "replicated", "expert")
        return {kind: Cut(self.reduction(kind).size, self.reduction(kind).replicas) for kind in kinds}

    @property
    def leads(self) -> bool:
        """Whether this rank logs, times saves and commits checkpoints."""
        return self.dims.leads(self.rank)

    @property
    def data_index(self) -> int:
        """Number of this rank's share of each global batch."""
        return self.dims.data_index(self.rank)

    @property
    def data_size(self) -> int:
        """Number of shares of each global batch."""
        return self.dims.data_parallel

    @property
    def stage(self) -> int:
        """Index on the pipeline axis."""
        return self.dims.coordinates(self.rank).pipeline

    @property
    def is_one_model(self) -> bool:
        """Whether every rank holds all parameters: nothing but data is cut."""
        return self.dims.size("pipeline", "tensor") == self.dims.expert == 1


class AxisGroups:
    """Opens groups of ranks, each once: axes that are the same ranks share one."""

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        """`timeout` applies to one collective."""
        self.device = device
        self._timeout = timeout
        self._communicators: dict[tuple[Ranks, ...], Communicator | None] = {}
        self._process_groups: dict[tuple[str, tuple[Ranks, ...]], dist.ProcessGroup | None] = {}

    def communicator(self, groups: Sequence[Ranks]) -> Communicator | None:
        """The communicator of this rank's group; None on ranks outside of all groups (collective over the gang)."""
        key = tuple(groups)
        if key not in self._communicators:
            made = [make_communicator(ranks, self.device, self._timeout) for ranks in key]
            self._communicators[key] = next((own for own in made if own is not None), None)
        return self._communicators[key]

    def process_group(self, groups: Sequence[Ranks], purpose: str = "") -> dist.ProcessGroup | None:
        """The process group of this rank's group; None for one rank, and outside of all groups (collective).

        `purpose`: work that must not wait for other work of the same ranks has a group of its own.
        """
        key = (purpose, tuple(groups))
        if key not in self._process_groups:
            made = [(ranks, self._new(ranks)) for ranks in groups]
            self._process_groups[key] = next((group for ranks, group in made if dist_rank() in ranks), None)
        return self._process_groups[key]

    def host_group(self, groups: Sequence[Ranks], _purpose: str) -> dist.ProcessGroup | None:
        """Like `process_group`, for tensors in host memory."""
        made = [(ranks, new_host_group(ranks, self._timeout) if len(ranks) > 1 else None) for ranks in groups]
        return next((group for ranks, group in made if dist_rank() in ranks), None)

    def _new(self, ranks: Ranks) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), timeout=self._timeout)
        return group if isinstance(group, dist.ProcessGroup) else None


def open_mesh(dims: ParallelDims, groups: AxisGroups, *, any_data_parallel: bool = False) -> Mesh | None:
    """Open the communicators of this rank; None on ranks that the grid does not have (collective over the gang).

    `any_data_parallel`: the order of a sum over replicas and other axes must not depend on the number of replicas.
    """
    world = groups.communicator([tuple(range(dims.world_size))])
    sums = _open_sums(dims, groups, any_data_parallel=any_data_parallel)
    tensor, context, pipeline = (groups.process_group(dims.groups(axis)) for axis in ("tensor", "context", "pipeline"))
    expert = groups.process_group(dims.expert_groups())
    links, first_links = _open_links(dims, groups)
    if world is None or sums is None:
        return None
    return Mesh(
        dims=dims,
        rank=dist_rank(),
        world=world,
        gradient=sums["dense"],
        replicated_gradient=sums["replicated"],
        expert_gradient=sums["expert"],
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        links=links,
        first_links=first_links,
    )


def _open_sums(
    dims: ParallelDims, groups: AxisGroups, *, any_data_parallel: bool
) -> dict[Reduction, Communicator] | None:
    """Open the communicators that sum gradients, each over its replicas too; None outside of the grid."""
    replicas = groups.communicator(dims.groups("replicate"))
    inner: dict[Reduction, Communicator | None] = {
        "dense": groups.communicator(dims.groups("context", "shard")),
        "replicated": groups.communicator(dims.groups("tensor", "context", "shard")),
        "expert": groups.communicator(dims.expert_replicas(replicates=False)),
    }
    ordered = _with_replicas_inside(dims, groups) if any_data_parallel else {}
    if replicas is None:
        return None
    return {kind: _with_replicas(found, replicas, ordered.get(kind)) for kind, found in inner.items()}


def _open_links(dims: ParallelDims, groups: AxisGroups) -> tuple[Links, Links | None]:
    """Open the channels of the pipeline; on GPUs those of the first passes, too."""
    pipelines, is_ring = dims.groups("pipeline"), dims.stages_per_rank > 1
    links = open_links(pipelines, groups.process_group, is_ring=is_ring)
    if groups.device.type != "cuda":
        return links, None
    return links, open_links(pipelines, groups.host_group, is_ring=is_ring, channel=HostLink)


def data_parallel_mesh(communicator: Communicator) -> Mesh:
    """The mesh of ranks that differ in their data alone, over a communicator of all of them."""
    return Mesh(
        dims=ParallelDims(shard=communicator.size),
        rank=communicator.rank,
        world=communicator,
        gradient=communicator,
        replicated_gradient=communicator,
        expert_gradient=communicator,
        tensor=None,
        context=None,
        pipeline=None,
        expert=None,
    )


def one_rank_mesh() -> Mesh:
    """The mesh of a run of one rank."""
    return data_parallel_mesh(Alone())


def _with_replicas_inside(dims: ParallelDims, groups: AxisGroups) -> dict[Reduction, Communicator | None]:
    """The communicators whose sums have the replicas beside `shard`, where other axes come after it."""
    found: dict[Reduction, Communicator | None] = {}
    if dims.replicate > 1 and dims.context > 1:
        found["dense"] = groups.communicator(dims.groups("context", "replicate", "shard"))
    if dims.replicate > 1 and dims.size("context", "tensor") > 1:
        found["replicated"] = groups.communicator(dims.groups("tensor", "context", "replicate", "shard"))
    return found


def _with_replicas(inner: Communicator | None, replicas: Communicator, whole: Communicator | None) -> Communicator:
    assert inner is not None
    if replicas.size == 1:
        return inner
    return Hybrid(inner, replicas) if whole is None else OrderedHybrid(inner, replicas, whole)
