"""Time of one step on a named GPU: computation, what communication adds, the pipeline's bubble, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.pipeline.formulas import bubble
from stoker.pod.pipeline.simulation import Costs
from stoker.pod.plan.context import merged_bytes
from stoker.pod.plan.expert_time import host_waits, moved_bytes
from stoker.pod.plan.gpu import (
    ALL_TO_ALL,
    ATTENTION,
    ATTENTION_START,
    COPIES,
    HIDDEN_COST,
    OWN_ATTENTION,
    PRODUCTS,
    Gpu,
)
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import recomputed
from stoker.pod.plan.optimizer_time import optimizer_time
from stoker.pod.plan.stage import PipelineRank, pipeline_ranks, pipeline_shape
from stoker.pod.plan.traffic import EXPERTS, Flow, flows

CAST_BYTES = {"Tensorwise": 8.0, "Rowwise": 20.0}
"""Bytes, at the rate of copies, that casting one value in both orders costs; measured on an H200."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the slowest pipeline rank."""

    products: float
    attention: float
    elementwise: float
    recompute: float
    communication: float
    """What it adds to the step."""
    optimizer: float
    bubble: float
    """Seconds that ranks of a pipeline wait."""
    bubble_share: float
    """Of the passes' time, between 0 and 1."""

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by part; their sum is `total`."""
        names = ("products", "attention", "elementwise", "recompute", "communication", "bubble", "optimizer")
        return {name: getattr(self, name) for name in names}


def step_time(job: Job, gpu: Gpu) -> StepTime:
    """Estimate the time of one step."""
    return max((_rank_time(job, gpu, rank) for rank in pipeline_ranks(job)), key=lambda time: time.total)


def _rank_time(job: Job, gpu: Gpu, rank: PipelineRank) -> StepTime:
    tokens, slow = job.tokens * job.micro_batches, _slow_rate(job, gpu)
    products = _products(job, gpu, rank)
    layers = rank.layers / job.layout.tensor
    attention = 3.5 * tokens * layers * job.model.attention_work(job.sequence_length) / (slow * _attention(job))
    again = tokens * rank.layers * recomputed(job).work / (slow * PRODUCTS)
    elementwise = tokens * _elementwise_bytes(job, rank) / (gpu.bandwidth * COPIES)
    exposed, hidden = _sent(job, gpu, rank)
    share, busy = pipeline_bubble(job), products + attention + again + elementwise + exposed
    return StepTime(
        products=products,
        attention=attention,
        elementwise=elementwise,
        recompute=again,
        communication=exposed + hidden * HIDDEN_COST + max(0.0, hidden - busy),
        optimizer=optimizer_time(job, gpu, rank, busy / job.micro_batches),
        bubble=busy * share / (1 - share),
        bubble_share=share,
    )


def _slow_rate(job: Job, gpu: Gpu) -> float:
    """Operations per second of what fp8 leaves in bf16: the head, attention, experts, backward of its softmax."""
    return gpu.flops["bf16"] if job.precision == "fp8" else gpu.flops[job.precision]


def _products(job: Job, gpu: Gpu, rank: PipelineRank) -> float:
    """Seconds of the products with weights, of the layers and of the output layer."""
    tensor, slow = job.layout.tensor, _slow_rate(job, gpu)
    work = (4.0 if job.adapters else 6.0) * job.tokens * job.micro_batches  # a frozen weight has no gradient
    wide = job.model.active_experts
    narrow = job.model.active_layer - wide
    layer_s = work * rank.layers / tensor * (narrow / gpu.flops[job.precision] + wide / slow) / PRODUCTS
    head = job.model.table / tensor if rank.is_last else 0.0
    return layer_s + work * head / (slow * PRODUCTS)


def _sent(job: Job, gpu: Gpu, rank: PipelineRank) -> tuple[float, float]:
    """Seconds of communication that a rank waits for, and of that beside computation."""
    seconds = {True: 0.0, False: host_waits(job, rank.layers)}
    for flow in flows(job, rank):
        seconds[flow.hidden] += flow.bytes / _rate(gpu, flow)
    return seconds[False], seconds[True]


def pipeline_bubble(job: Job) -> float:
    """Return the share of the passes' time in which the ranks of a pipeline wait."""
    if job.layout.pipeline == 1:
        return 0.0
    forward = 2.0 if job.layout.recompute == "full" else 1.0
    costs = Costs(forward=1.0, backward_input=forward, backward_weight=1.0)
    return bubble(job.layout.schedule, pipeline_shape(job), costs)


def _elementwise_bytes(job: Job, rank: PipelineRank) -> float:
    """Bytes that norms, rotation and activation functions read and write for one token, forward and backward."""
    model, layout = job.model, job.layout
    width = model.experts_per_token * model.expert_size or model.intermediate_size
    stream = 24 * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    values = job.value_bytes * (stream + 12 * width / layout.tensor)
    return rank.layers * (values + moved_bytes(job) + merged_bytes(job) + _cast_bytes(job))


def _attention(job: Job) -> float:
    """Part of the peak that attention reaches: with keys of other ranks it is our own."""
    own = job.layout.context > 1 and job.layout.context_method != "Ulysses"
    length = job.sequence_length / (job.sequence_length + ATTENTION_START)
    return ATTENTION * length * (OWN_ATTENTION if own else 1.0)


def _cast_bytes(job: Job) -> float:
    """Bytes of casting a layer's inputs and gradients of products to eight bits, for one token."""
    if job.precision != "fp8":
        return 0.0
    model = job.model
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    dense = 1 - model.expert_share
    values = (2 + 2 * dense) * model.hidden_size + (heads + 3 * dense * model.intermediate_size) / job.layout.tensor
    return CAST_BYTES[job.fp8_recipe] * values


def _rate(gpu: Gpu, flow: Flow) -> float:
    rate = gpu.link if flow.link == "node" else gpu.network
    return rate * (ALL_TO_ALL if flow.purpose == EXPERTS else 1.0)
