"""The pipeline ranks of a job: the layers and parameters that each one holds."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.pipeline.actions import Shape
from stoker.pod.pipeline.formulas import live_activations
from stoker.pod.pipeline.stage_cut import LayerCosts, cut_layers
from stoker.pod.plan.job import Job
from stoker.pod.plan.model_size import ModelSize


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """The share of one pipeline rank."""

    index: int
    layers: int
    """Of all its stages."""
    largest_stage: int
    """Layers of its largest stage."""
    is_first: bool
    """Holds the embedding."""
    is_last: bool
    """Holds the final norm and the output layer."""
    live_stages: int
    """Most activations of one stage and micro-batch that it holds at once."""


def pipeline_shape(job: Job) -> Shape:
    """The sizes that the schedule depends on."""
    layout = job.layout
    return Shape(ranks=layout.pipeline, stages_per_rank=layout.stages_per_rank, micro_batches=job.micro_batches)


def layer_costs(model: ModelSize, sequence_length: int) -> LayerCosts:
    """Operations per token of each layer and of the head, forward and backward."""
    layer = 3 * (2.0 * model.active_layer + model.attention_work(sequence_length))
    return LayerCosts(layers=(layer,) * model.num_layers, embedding=2.0 * model.hidden_size, head=6.0 * model.table)


def stage_layers(job: Job) -> list[range]:
    """Return the layers of every stage, in the order of the forward pass."""
    costs = layer_costs(job.model, job.sequence_length)
    return list(cut_layers(costs, job.layout.pipeline * job.layout.stages_per_rank))


def pipeline_ranks(job: Job) -> list[PipelineRank]:
    """Return the share of every pipeline rank; one rank for a job without a pipeline."""
    p, v = job.layout.pipeline, job.layout.stages_per_rank
    stages = stage_layers(job)
    shape = pipeline_shape(job)
    ranks = []
    for index in range(p):
        held = [len(stages[index + turn * p]) for turn in range(v)]
        live = live_activations(job.layout.schedule, shape, index) if p > 1 else 1
        ranks.append(
            PipelineRank(
                index=index,
                layers=sum(held),
                largest_stage=max(held),
                is_first=index == 0,
                is_last=index == p - 1,
                live_stages=live,
            )
        )
    return ranks


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Elements that one rank multiplies with, before ZeRO cuts them."""

    dense: float
    experts: float
    block: float
    """Of one layer: the bucket that is sent and gathered."""
    dense_block: float
    """The part of it that is not experts."""
    embedding: float
    head: float
    adapters: float | None = None
    """Of a model that is frozen but for them; those of experts left out."""
    expert_adapters: float = 0.0

    @property
    def total(self) -> float:
        """Without adapters."""
        return self.dense + self.experts

    @property
    def trained(self) -> float:
        """Elements that have a gradient."""
        return self.total if self.adapters is None else self.adapters + self.expert_adapters

    @property
    def largest(self) -> float:
        """The longest bucket."""
        return max(self.block, self.embedding, self.head)


def rank_parameters(job: Job, rank: PipelineRank) -> Parameters:
    """Return the elements of a pipeline rank's weights, cut by tensor and expert parallelism."""
    model, tensor = job.model, job.layout.tensor
    dense_layer = (model.attention + model.feed_forward) / tensor + model.small
    expert_layer = model.experts / job.layout.expert_cut
    table = model.table / tensor
    tied_here = model.tie_embeddings and rank.is_first
    embedding = table if rank.is_first else 0.0
    head = (0.0 if tied_here else table) + model.hidden_size if rank.is_last else 0.0
    return Parameters(
        dense=rank.layers * dense_layer + embedding + head,
        experts=rank.layers * expert_layer,
        block=dense_layer + expert_layer,
        dense_block=dense_layer,
        embedding=embedding,
        head=head,
        adapters=None if job.adapters is None else rank.layers * job.adapters.layer_elements(model, tensor),
        expert_adapters=0.0 if job.adapters is None else rank.layers * job.adapters.expert_elements(model, job.layout),
    )
