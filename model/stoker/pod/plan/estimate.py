"""The plan of a job: memory, traffic and time together, as values and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.pod.plan.activations import Recomputed
from stoker.pod.plan.gpu import RESERVE_BYTES, Gpu
from stoker.pod.plan.job import Job
from stoker.pod.plan.layer_choice import LayerChoice, layer_choices
from stoker.pod.plan.memory import Memory, memory_by_rank, recomputed
from stoker.pod.plan.stage import pipeline_ranks
from stoker.pod.plan.step_time import StepTime, step_time
from stoker.pod.plan.traffic import Flow, flows


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job needs."""

    job: Job
    gpu: Gpu | None
    memory: tuple[Memory, ...]
    """By pipeline rank."""
    flows: tuple[Flow, ...]
    """Of the first pipeline rank."""
    recomputed: Recomputed
    choices: tuple[LayerChoice, ...]
    """Of the layers, first to last: what backward computes again."""
    time: StepTime | None
    """None without a GPU."""

    @property
    def fullest(self) -> Memory:
        """The memory of the rank that needs most."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits, with the reserve for libraries; None where the GPU is not known."""
        if self.gpu is None:
            return None
        return self.fullest.total + RESERVE_BYTES <= self.gpu.memory_bytes

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        if self.time is None:
            return None
        return self.job.step_tokens / self.job.layout.world_size / self.time.total

    def to_json(self) -> dict[str, Any]:
        """Return bytes, seconds and sizes as plain data."""
        time = self.time
        return {
            "job": self.job.name,
            "gpu": self.gpu.name if self.gpu else None,
            "parameters": self.job.model.parameters,
            "layout": asdict(self.job.layout),
            "micro_batches": self.job.micro_batches,
            "memory_bytes": {
                **self.fullest.parts(),
                "total": self.fullest.total,
                "host": self.fullest.host,
                "disk": self.fullest.disk,
            },
            "memory_bytes_by_pipeline_rank": [memory.total for memory in self.memory],
            "recomputed": list(self.recomputed.again),
            "recomputed_by_layer": [choice.shown() for choice in self.choices],
            "fits": self.fits,
            "traffic": [asdict(flow) for flow in self.flows],
            "step_s": None if time is None else {**time.parts(), "total": time.total},
            "bubble": None if time is None else time.bubble_share,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
        }


def make_plan(job: Job, gpu: Gpu | None) -> Plan:
    """Compute the plan of a job.

    Raises:
        BudgetTooSmall: the budget of activations cannot be met.
        ValueError: the GPU has no products in the job's precision.
    """
    if gpu is not None:
        gpu.check_precision(job.precision)
    rank = pipeline_ranks(job)[0]
    return Plan(
        job=job,
        gpu=gpu,
        memory=tuple(memory_by_rank(job)),
        flows=tuple(flows(job, rank)),
        recomputed=recomputed(job),
        choices=layer_choices(job),
        time=None if gpu is None else step_time(job, gpu),
    )
