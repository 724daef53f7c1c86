"""Traffic of one rank in one step, by purpose and link."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from stoker.pod.plan.context import context_sent
from stoker.pod.plan.job import Job
from stoker.pod.plan.layer_choice import layer_choices, sent_again
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.memory import SUM_BYTES, sends_each
from stoker.pod.plan.stage import Parameters, PipelineRank, pipeline_ranks, rank_parameters

Link = Literal["node", "network"]
EXPERTS = "experts"
"""Purpose of the all-to-all of rows."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Bytes that one rank sends in one step for one purpose."""

    purpose: str
    link: Link
    """`network`: the group reaches over nodes."""
    bytes: float
    hidden: bool
    """Beside computation; else the rank waits for it."""


def flows(job: Job, rank: PipelineRank | None = None) -> list[Flow]:
    """Return what a rank sends, without empty flows. `rank`: the pipeline rank; None is the first."""
    rank = rank or pipeline_ranks(job)[0]
    parameters = rank_parameters(job, rank)
    found = [
        *_zero(job, parameters),
        _tensor(job, rank),
        _context(job, rank),
        _expert(job, rank),
        _pipeline(job),
    ]
    return [flow for flow in found if flow.bytes > 0]


def link_of(job: Job, *axes: str) -> Link:
    """Return the link of the group over some axes: its ranks lie in one node where its span does."""
    order = ("pipeline", "replicate", "shard", "context", "tensor")
    outermost = min(order.index(axis) for axis in axes)
    span = 1
    for axis in order[outermost:]:
        span *= getattr(job.layout, axis)
    return "node" if span <= job.ranks_per_node else "network"


def _zero(job: Job, parameters: Parameters) -> list[Flow]:
    shards, replicas, stage = job.layout.state_shards, job.layout.replicate, job.layout.zero_stage
    others, size = _others(shards), job.value_bytes
    each = sends_each(job)
    times = job.micro_batches if each else 1
    trained = parameters.trained
    reduced = times * (size if each else SUM_BYTES) * trained * others
    gathered = {0: SUM_BYTES, 1: size, 2: size, 3: 0}[stage] * trained * others
    if stage == 3:
        # For forward and for backward, which needs no embedding and begins with the output layer that is still there.
        adapters = 0.0 if parameters.adapters is None else parameters.trained
        passes = 2 * parameters.total - parameters.embedding - parameters.head
        gathered = size * (job.micro_batches * passes + adapters) * others
    copies = 2 * _others(replicas) * SUM_BYTES * trained / shards
    if job.copies_gradients:
        reduced /= replicas
        copies = _others(replicas) * trained * ((size if each else SUM_BYTES) + SUM_BYTES / shards)
    inner, outer = link_of(job, "shard", "context"), link_of(job, "replicate")
    return [
        Flow(purpose="gradients reduced", link=inner, bytes=reduced, hidden=True),
        Flow(purpose="weights gathered", link=inner, bytes=gathered, hidden=stage > 0),
        Flow(purpose="gradients over replicas", link=outer, bytes=copies, hidden=True),
    ]


def _tensor(job: Job, rank: PipelineRank) -> Flow:
    """Two sums over the ranks in forward and two in backward of each layer, each twice a pass of its rows; and what
    backward sends again.
    """
    once = 8 * job.model.hidden_size * job.value_bytes * _others(job.layout.tensor)
    sent = job.micro_batches * job.tokens * rank.layers * (once + _mean_sent_again(job))
    return Flow(purpose="tensor parallel", link=link_of(job, "tensor"), bytes=sent, hidden=False)


@lru_cache(maxsize=64)
def _mean_sent_again(job: Job) -> float:
    """Return the bytes of one token that a layer sends again, of all ranks of a pipeline alike."""
    if job.layout.tensor == 1:
        return 0.0
    times = Counter(zip(layer_jobs(job), layer_choices(job), strict=True))
    return sum(count * sent_again(kind, choice) for (kind, choice), count in times.items()) / times.total()


def _context(job: Job, rank: PipelineRank) -> Flow:
    link, is_hidden = link_of(job, "context"), job.layout.context_method == "Ring"
    sent = job.micro_batches * rank.layers * context_sent(job)
    return Flow(purpose="context parallel", link=link, bytes=sent, hidden=is_hidden)


def _expert(job: Job, rank: PipelineRank) -> Flow:
    """Dispatch and combine, forward and backward."""
    model = job.model
    rows = job.micro_batches * job.tokens * job.expert_rows * model.hidden_size * job.value_bytes
    link = link_of(job, "tensor") if job.layout.expert <= job.layout.tensor else link_of(job, "shard")
    sent = 4 * rank.layers * rows * _others(job.layout.expert)
    return Flow(purpose=EXPERTS, link=link, bytes=sent, hidden=False)


def _pipeline(job: Job) -> Flow:
    layout = job.layout
    rows = job.micro_batches * job.tokens * job.model.hidden_size * job.value_bytes
    sent = 2 * layout.stages_per_rank * rows if layout.pipeline > 1 else 0.0
    return Flow(purpose="pipeline", link=link_of(job, "pipeline"), bytes=sent, hidden=True)


def _others(ranks: int) -> float:
    """The part of a buffer that belongs to other ranks of a group."""
    return (ranks - 1) / ranks
