"""The layouts of a job on a number of GPUs: those that fit, with the same global batch, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from stoker.pod.capabilities import refusals
from stoker.pod.plan.estimate import Plan, make_plan
from stoker.pod.plan.gpu import Gpu
from stoker.pod.plan.job import Job, Layout, Recompute
from stoker.pod.plan.layout_rules import trainer_runs

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def layouts(job: Job, gpus: int, gpu: Gpu, *, built_only: bool = True) -> list[Plan]:
    """Return a plan for each layout of `gpus` ranks that fits, the fastest first, then the one with less memory.

    Model, global batch, sequence length, micro-batch, precision and a budget of activations stay. Shards lie over all
    data-parallel ranks, over those of one node, or in as many replicas as the job has. `built_only`: leave out what
    `stoker.pod.capabilities` and the trainer refuse.
    """
    plans = (_plan(candidate, gpu) for candidate in _candidates(job, gpus, gpu, built_only))
    return sorted((plan for plan in plans if plan is not None and plan.fits), key=_rank_of)


def _plan(candidate: Job, gpu: Gpu) -> Plan | None:
    """The plan, or None where a budget of activations cannot be met or planned."""
    try:
        return make_plan(candidate, gpu)
    except ValueError:
        return None


def _rank_of(plan: Plan) -> tuple[float, float, int]:
    assert plan.time is not None
    layout = plan.job.layout
    return plan.time.total, plan.fullest.total, layout.tensor * layout.pipeline * layout.context


def _candidates(job: Job, gpus: int, gpu: Gpu, built_only: bool) -> Iterator[Job]:
    nodes = min(gpu.per_node, gpus)
    choices = _RECOMPUTE if job.activation_budget_bytes is None else ("selective",)
    for grid, stage, recompute in product(_grids(job, gpus, nodes), range(4), choices):
        if stage == 0 and grid.replicate > 1:
            continue  # whole state on every rank, whatever the replicas are
        candidate = replace(job, layout=replace(grid, zero_stage=stage, recompute=recompute), ranks_per_node=nodes)
        if _divides(candidate) and not (built_only and _is_refused(candidate)):
            yield candidate


def _is_refused(candidate: Job) -> bool:
    return not trainer_runs(candidate) or bool(refusals("trainer", _fields(candidate)))


def _grids(job: Job, gpus: int, per_node: int) -> Iterator[Layout]:
    for tensor, pipeline, context in product(_divisors(gpus), repeat=3):
        inner = tensor * pipeline * context
        if gpus % inner or tensor > per_node:
            continue
        for replicate in _replicas(job, gpus // inner, tensor * context, per_node):
            shard = gpus // inner // replicate
            for expert in _divisors(shard * tensor) if job.model.num_experts else (1,):
                sizes: Any = {"pipeline": pipeline, "replicate": replicate, "shard": shard, "context": context}
                yield _as_wanted(Layout(**sizes, tensor=tensor, expert=expert), job.layout)


def _replicas(job: Job, data_parallel: int, inner: int, per_node: int) -> list[int]:
    """Return the numbers of replicas that are worth a plan."""
    nodes = data_parallel * inner // per_node
    found = sorted({1, job.layout.replicate, *([nodes] if nodes * per_node == data_parallel * inner else [])})
    return [count for count in found if count and data_parallel % count == 0]


def _as_wanted(sizes: Layout, wants: Layout) -> Layout:
    """Return a layout of these sizes whose ranks work together as the job wants it."""
    pipeline, context = sizes.pipeline > 1, sizes.context > 1
    return replace(
        sizes,
        sequence_parallel=sizes.tensor > 1,
        schedule=wants.schedule if pipeline else "OneFOneB",
        stages_per_rank=wants.stages_per_rank if pipeline else 1,
        context_method=wants.context_method if context else "AllGather",
    )


def _divides(job: Job) -> bool:
    try:
        job.check()
    except ValueError:
        return False
    return job.micro_batches >= 1


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _fields(job: Job) -> Mapping[str, Any]:
    """The layout, and what it depends on of the model, as the trainer's configuration writes it."""
    layout = job.layout
    return {
        "model": {"num_experts": job.model.num_experts or None},
        "parallelism": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "pipeline_schedule": layout.schedule,
            "stages_per_rank": layout.stages_per_rank,
            "expert": layout.expert,
            "context": layout.context,
            "context_method": layout.context_method,
            "sequence_parallel": layout.sequence_parallel,
            "replicate": layout.replicate,
        },
        "memory": {
            "zero_stage": layout.zero_stage,
            "activation_checkpointing": layout.recompute,
            "activation_budget_gib": job.activation_budget_bytes,
        },
    }
