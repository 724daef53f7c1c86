"""What a pipeline rank holds at the fullest moments of its schedule, with gradients of weights that are put off.

A micro-batch keeps its activations until the backward pass of its inputs; from then until its weights' gradients are
computed it keeps what these products read (zero-bubble, arXiv 2401.10241). Bytes are per token of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from stoker.pod.pipeline.actions import Action, Kind, Shape
from stoker.pod.pipeline.schedules import compute_order
from stoker.pod.plan.job import ALL_TARGETS, OF_FEED_FORWARD, Job
from stoker.pod.plan.stage import PipelineRank, pipeline_shape

FP8_ROWS = 16
"""Tokens of a gradient in eight bits are filled up to a multiple of it."""
FLOAT_BYTES = 4


class Moment(NamedTuple):
    """Passes of one stage and micro-batch that a rank holds at once."""

    whole: int
    """With all their activations."""
    late: int
    """With what the late gradients read."""
    turns: bool
    """One more turns from the first to the second, layer by layer: its backward pass is under way."""

    @property
    def passes(self) -> int:
        return self.whole + self.late + self.turns


def fullest_moments(job: Job, rank: PipelineRank) -> tuple[Moment, ...]:
    """Return the moments of a rank of which none holds less than another of its kind."""
    if job.layout.schedule != "ZeroBubble":
        return (Moment(rank.live_stages, 0, turns=False),)
    return _of_order(short_shape(pipeline_shape(job)))[rank.index]


def short_shape(shape: Shape) -> Shape:
    """The sizes of a schedule of at most 3 p micro-batches that has the same moments: they recur with every p."""
    p, m = shape.ranks, shape.micro_batches
    return replace(shape, micro_batches=min(m, 2 * p + m % p))


def held_of_layer(job: Job, moments: tuple[Moment, ...], kept: float) -> float:
    """Return the bytes of one layer in all passes that a rank holds, at most. `kept`: by one pass, before backward."""
    late = late_bytes(job)
    return max(one.whole * kept + one.late * late + one.turns * max(kept, late) for one in moments)


def turning(job: Job, kept: float) -> float:
    """Return what the layer that backward passes holds beside that: its activations and its late gradients at once."""
    splits = job.layout.pipeline > 1 and job.layout.schedule == "ZeroBubble"
    return min(kept, late_bytes(job)) if splits else 0.0


@lru_cache(maxsize=64)
def _of_order(shape: Shape) -> list[tuple[Moment, ...]]:
    """By rank."""
    return [moments_of(order) for order in compute_order("ZeroBubble", shape)]


def moments_of(order: Sequence[Action]) -> tuple[Moment, ...]:
    """Return the moments in the passes of one rank of which none holds less than another of its kind."""
    found: set[Moment] = set()
    whole = late = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            whole += 1
            found.add(Moment(whole, late, turns=False))
        elif action.kind is Kind.BACKWARD_INPUT:
            whole -= 1
            found.add(Moment(whole, late, turns=True))
            late += 1
        else:
            late -= 1
    return tuple(sorted(one for one in found if not any(_holds_more(other, one) for other in found)))


def _holds_more(one: Moment, other: Moment) -> bool:
    return one != other and all(mine >= others for mine, others in zip(one, other, strict=True))


def late_bytes(job: Job) -> float:
    """Return what the late gradients of one layer read: input of each product, and the gradient of its result.

    Products are those of q, k and v, of attention's result, of gate and up, and of down; with adapters theirs, and not
    those of the frozen weights. What forward computes again is part of it: it is computed in the backward pass of the
    inputs. Gradients that are ready wait beside it.
    """
    of_product = _trained if job.adapters is None else _adapted
    late = sum(of_product(job, product) for product in _products(job))
    return late + _ready(job) / job.tokens


class _Product(NamedTuple):
    """Columns of one product on one rank."""

    targets: tuple[str, ...]
    """Names of the projections in it."""
    inputs: float
    outputs: float


def _products(job: Job) -> list[_Product]:
    """The products of a layer that are put off; those of experts are not."""
    model, tensor = job.model, job.layout.tensor
    heads, kv_heads = (count * model.head_dim / tensor for count in (model.num_heads, model.num_kv_heads))
    width, hidden = model.intermediate_size / tensor, float(model.hidden_size)
    attention = [
        _Product(ALL_TARGETS[:3], hidden, heads + 2 * kv_heads),
        _Product(ALL_TARGETS[3:4], heads, hidden),
    ]
    if model.num_experts:
        return attention
    return [*attention, _Product(OF_FEED_FORWARD[:2], hidden, 2 * width), _Product(OF_FEED_FORWARD[2:], width, hidden)]


def _trained(job: Job, product: _Product) -> float:
    """In fp8 the gradient has eight bits, and a scale for each column or row; the input is cast again."""
    if job.precision != "fp8":
        return job.value_bytes * (product.inputs + product.outputs)
    rows = -(-job.tokens // FP8_ROWS) * FP8_ROWS / job.tokens
    scales = FLOAT_BYTES * (2 + (product.inputs + product.outputs) / job.tokens)
    return job.value_bytes * product.inputs + rows * product.outputs + scales


def _adapted(job: Job, product: _Product) -> float:
    """The adapters of some sections of a product: its input, A x and its gradient, and the gradient of all sections."""
    assert job.adapters is not None
    named = sum(target in job.adapters.targets for target in product.targets)
    inner = 2 * named * job.adapters.rank
    return job.value_bytes * (product.inputs + product.outputs + inner) if named else 0.0


def _ready(job: Job) -> float:
    """Bytes of gradients that are computed in the backward pass of the inputs, and wait for the others of their bucket.

    Those of norms, biases and routers; of experts that share their bucket, and of adapters of experts.
    """
    model, size = job.model, job.value_bytes
    if job.adapters is not None:
        return size * job.adapters.expert_elements(model, job.layout)
    experts = model.experts / job.layout.tensor if job.layout.expert == 1 else 0.0
    router = FLOAT_BYTES * job.tokens * (model.hidden_size + model.num_experts) if model.num_experts else 0.0
    return size * (model.small + experts) + (router if size == FLOAT_BYTES else 0.0)
