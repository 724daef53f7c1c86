"""The kinds of layers in one model: dense ones and ones with experts, each with sizes of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from stoker.pod.plan.job import Job


@lru_cache(maxsize=64)
def layer_jobs(job: Job) -> tuple[Job, ...]:
    """Return the job as each layer sees it, first to last: with a model all of whose layers are of that kind.

    Sizes of a layer, which are means over all layers in a mixed model, are exact in these jobs.
    """
    model = job.model
    if not model.is_mixed:
        return (job,) * model.num_layers
    experts = replace(job, model=replace(model, dense_at=()))
    of_dense = replace(model, num_experts=0, experts_per_token=0, expert_size=0, dense_at=())
    dense = replace(job, model=of_dense, layout=replace(job.layout, expert=1))
    return tuple(dense if layer in model.dense_at else experts for layer in range(model.num_layers))
