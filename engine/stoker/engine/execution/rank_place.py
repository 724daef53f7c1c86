"""The place of one rank: its stage of the pipeline, the ranks that share its layers, and the links to other stages.

Ranks are numbered from the end of the pipeline: the first `tensor` ranks are the last stage, because rank 0 is the
leader and reads the sampled tokens. Within a stage neighbours are a tensor group.

Called by `load` on every rank; making groups is collective.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stoker.engine.execution.stage_links import Edge, StageLinks
from stoker.engine.plan import EnginePlan
from stoker.engine.stage_cut import stage_layers, stage_of
from stoker.model.config import ModelConfig


class RankPlace(NamedTuple):
    """The place of one rank."""

    layers: range
    tensor: ProcessGroup | None
    """The ranks that share these layers; None for one."""
    links: StageLinks | None
    """None without a pipeline."""


def rank_of(stage: int, place: int, tensor: int, pipeline: int) -> int:
    """The rank at a place of a stage's tensor group."""
    return (pipeline - 1 - stage) * tensor + place


def place_of(plan: EnginePlan, config: ModelConfig, world: ProcessGroup | None, device: torch.device) -> RankPlace:
    """Make the groups of a rank and connect it. Called by all ranks together."""
    if plan.pipeline == 1 or world is None:
        return RankPlace(range(config.num_layers), world, None)
    tensor, pipeline, rank = plan.tensor, plan.pipeline, dist.get_rank(world)
    stage, place = stage_of(rank, tensor, pipeline), rank % tensor
    shared, groups = make_groups(plan, world)

    def edge(first: int, peer_stage: int) -> Edge:
        return Edge(groups[first, place], rank_of(peer_stage, place, tensor, pipeline))

    last = pipeline - 1
    links = StageLinks(
        stage,
        pipeline,
        device=device,
        dtype=plan.dtype,
        hidden_size=config.hidden_size,
        num_seats=plan.num_seats,
        before=edge(stage - 1, stage - 1) if stage else None,
        behind=edge(stage, stage + 1) if stage < last else None,
        tokens=edge(last, {0: last, last: 0}[stage]) if stage in (0, last) else None,
    )
    links.warm_up()
    return RankPlace(stage_layers(config, pipeline)[stage], shared[stage], links)


Edges = dict[tuple[int, int], ProcessGroup]
"""(stage, place) -> the group of that rank and its follower; behind the last stage comes the first."""


def make_groups(plan: EnginePlan, world: ProcessGroup) -> tuple[list[ProcessGroup | None], Edges]:
    """Make all tensor groups, by stage, and all edges, in the same order on every rank."""
    tensor, pipeline = plan.tensor, plan.pipeline

    def group(ranks: list[int]) -> ProcessGroup:
        options = world._get_backend(torch.device("cpu")).options if plan.device == "cpu" else None
        made = dist.new_group(sorted(ranks), pg_options=options)
        return cast("ProcessGroup", made)  # at ranks outside it is a mark that is never used

    shared: list[ProcessGroup | None] = [
        group([rank_of(stage, place, tensor, pipeline) for place in range(tensor)]) if tensor > 1 else None
        for stage in range(pipeline)
    ]
    edges = {
        (stage, place): group([rank_of(one, place, tensor, pipeline) for one in (stage, (stage + 1) % pipeline)])
        for stage in range(pipeline)
        for place in range(tensor)
    }
    return shared, edges
