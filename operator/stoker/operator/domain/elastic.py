"""Fewer or more workers for a run: the forms that it can have, and when it changes. Pure.

A form keeps model, global batch, micro-batch and precision; only the number of data-parallel ranks changes. Where the
present layout does not divide that number of workers, or is known not to fit, the fastest one of `stoker.pod.plan` is
taken, if the GPU is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.job_plan import gpu_of_spec, job_of_spec, too_large
from stoker.operator.domain.unsupported import unsupported
from stoker.pod.plan.job import Layout
from stoker.pod.plan.layouts import layouts

OTHER_LAYOUTS = 4
"""Sizes for which another layout is looked for, the largest first: each costs an enumeration."""

Form = Mapping[str, Any]
"""What differs from the spec: `workers.replicas`, and sections of another layout."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast sizes may change."""

    patience_s: float = 60.0
    """Time that a gang waits for room before it is made smaller."""
    rest_s: float = 600.0
    """Shortest time from one change of the size to the next."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`run.elastic`, in workers, and the pace of the installation."""

    smallest: int
    largest: int
    pace: Pace = Pace()


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a decision depends on beside the room."""

    now: datetime
    workers: int
    """Of the present attempt."""
    runs: bool
    """Whether the gang has its nodes; otherwise it waits for room."""
    since: datetime
    """When it began to wait, or got its nodes."""
    changed: datetime | None = None
    """The last change of the size."""


def due_in_s(moment: Moment, pace: Pace) -> float:
    """Seconds until the size may change; 0: now."""
    patience_s = 0.0 if moment.runs else rest_s(moment.since, pace.patience_s, moment.now)
    began = moment.changed if moment.changed is not None else moment.since if moment.runs else None
    return max(patience_s, rest_s(began, pace.rest_s, moment.now) if began is not None else 0.0)


def resized(
    spec: Mapping[str, Any], limits: Limits, moment: Moment, has_room: Callable[[Mapping[str, Any]], bool]
) -> Form | None:
    """Return the form to change to; None to stay.

    A gang that runs only grows. One that waits takes the largest size that has room now.

    Args:
        spec: in wire form, as the user wrote it.
        has_room: whether a gang of this spec could be placed now, the room of the run itself counted as free.
    """
    if due_in_s(moment, limits.pace) > 0:
        return None
    smallest = moment.workers + 1 if moment.runs else limits.smallest
    for form in _forms(spec, range(limits.largest, smallest - 1, -1)):
        if has_room(with_form(spec, form)):
            return None if form["workers"]["replicas"] == moment.workers else form
    return None


def may_grow(job: Mapping[str, Any]) -> bool:
    """Whether a job, as it is stored, runs with fewer workers than `run.elastic` allows."""
    elastic, status = (job["spec"].get("run") or {}).get("elastic"), job.get("status") or {}
    rendered = (status.get("pinned") or {}).get("rendered")
    if not elastic or not rendered or status.get("finishedAt"):
        return False
    return bool(rendered["config"]["gang"]["nodes"] < elastic["maxWorkers"])


def with_form(spec: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The spec in another form."""
    return {**spec, **{name: {**(spec.get(name) or {}), **section} for name, section in form.items()}}


def _forms(spec: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[Form]:
    """A form for each size that has one, in the order of the sizes."""
    searches = OTHER_LAYOUTS
    for size in sizes:
        form: Form = {"workers": {"replicas": size}}
        candidate = with_form(spec, form)
        if divides(candidate) and not too_large(candidate):
            yield form
        elif searches and spec.get("model") and gpu_of_spec(spec):
            searches -= 1
            other = _other_layout(candidate)
            if other is not None:
                yield {**form, **other}


def divides(spec: Mapping[str, Any]) -> bool:
    """Whether ranks and batch divide: the rules of admission, with the numbers of this spec."""
    workers, training, sizes = (spec.get(name) or {} for name in ("workers", "training", "parallelism"))
    ranks = workers.get("ranksPerPod") or max(workers.get("gpusPerPod") or 0, 1)
    tensor, replicate = sizes.get("tensor", 1), sizes.get("replicate", 1)
    inner = tensor * sizes.get("pipeline", 1) * sizes.get("context", 1)
    data, rest = divmod(workers.get("replicas", 1) * ranks, inner)
    if rest or not data or data % replicate or data // replicate * tensor % sizes.get("expert", 1):
        return False
    if training.get("deterministic") == "AnyDataParallel" and data & (data - 1):
        return False
    return not training.get("globalBatchSize", 8) % (training.get("microBatchSize", 1) * data)


def _other_layout(spec: Mapping[str, Any]) -> Form | None:
    """The fastest layout for the size of this spec; None where none fits."""
    return _searched(json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=256)
def _searched(written: str) -> Form | None:
    """Search all layouts, which takes seconds for some hundred GPUs: once, for a run below its limit is seen often."""
    spec = json.loads(written)
    gpu = gpu_of_spec(spec)
    assert gpu is not None
    workers = spec["workers"]
    ranks = workers.get("ranksPerPod") or max(workers.get("gpusPerPod") or 0, 1)
    plain = {name: section for name, section in spec.items() if name not in ("parallelism", "workers")}
    try:
        job = job_of_spec({**plain, "workers": {"replicas": 1, "ranksPerPod": 1}})
    except ValueError:
        return None
    for plan in layouts(job, workers["replicas"] * ranks, gpu):
        form = _sections(plan.job.layout)
        candidate = with_form(spec, form)
        if plan.job.layout.tensor <= ranks and divides(candidate) and not unsupported("TrainingJob", candidate):
            return form
    return None


def _sections(layout: Layout) -> dict[str, dict[str, Any]]:
    return {
        "parallelism": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "pipelineSchedule": layout.schedule,
            "stagesPerRank": layout.stages_per_rank,
            "expert": layout.expert,
            "context": layout.context,
            "contextMethod": layout.context_method,
            "sequenceParallel": layout.sequence_parallel,
            "replicate": layout.replicate,
        },
        "memory": {"zeroStage": layout.zero_stage, "activationCheckpointing": layout.recompute},
    }
