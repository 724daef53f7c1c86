"""What a pipeline rank holds at the fullest moments of its schedule, with gradients of weights that are put off.

A micro-batch keeps its activations until the backward pass of its inputs; from then until its weights' gradients are
computed it keeps what these products read (zero-bubble, arXiv 2401.10241). Bytes are per token of a rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from stoker.pod.pipeline.actions import Kind, Shape
from stoker.pod.pipeline.schedules import compute_order
from stoker.pod.plan.job import Job
from stoker.pod.plan.stage import PipelineRank, pipeline_shape


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
    return _of_order(pipeline_shape(job), rank.index)


def held_of_layer(job: Job, moments: tuple[Moment, ...], kept: float) -> float:
    """Return the bytes of one layer in all passes that a rank holds, at most. `kept`: by one pass, before backward."""
    late = late_bytes(job)
    return max(one.whole * kept + one.late * late + one.turns * max(kept, late) for one in moments)


def turning(job: Job, kept: float) -> float:
    """Return what the layer that backward passes holds beside that: its activations and its late gradients at once."""
    splits = job.layout.pipeline > 1 and job.layout.schedule == "ZeroBubble"
    return min(kept, late_bytes(job)) if splits else 0.0


@lru_cache(maxsize=64)
def _of_order(shape: Shape, rank: int) -> tuple[Moment, ...]:
    found: set[Moment] = set()
    whole = late = 0
    for action in compute_order("ZeroBubble", shape)[rank]:
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

    Products are those of q, k and v, of attention's result, of gate and up, and of down. What forward computes again is
    part of it: it is computed in the backward pass of the inputs. The gradients of the norms' weights are ready, and
    wait.
    """
    model, size = job.model, job.value_bytes
    heads, kv_heads = (count * model.head_dim / job.layout.tensor for count in (model.num_heads, model.num_kv_heads))
    width, hidden = model.intermediate_size / job.layout.tensor, model.hidden_size
    attention = (hidden + heads + 2 * kv_heads) + (heads + hidden)
    feed_forward = (hidden + 2 * width) + (width + hidden)
    ready = 2 * (model.hidden_size + model.head_dim) / job.tokens
    return size * (attention + feed_forward + ready)
