"""The plan of a run against its first steps, on the leading rank.

Fed by the loop with the time of each step; it sends one event when it has seen enough, and is then idle.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from stoker.model.config import ModelConfig
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.estimate import Plan, make_plan
from stoker.pod.plan.gpu import known_gpu
from stoker.pod.plan.job import Job
from stoker.pod.plan.layer_choice import BudgetTooSmall, LayerChoice, layer_choices, stage_choices
from stoker.pod.plan.measured import STEPS, check_plan
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import PlanEvent
from stoker.trainer.rank.memory_peak import MemoryPeak


class PlanWatch:
    """Collects the times of the first steps and compares them, and the memory that they took, with the plan."""

    def __init__(self, plan: Plan, stage: int, channel: RankChannel, peak: MemoryPeak) -> None:
        """`stage`: this rank's index on the pipeline axis. `peak`: from before the weights were made."""
        self._plan, self._stage = plan, stage
        self._channel, self._peak = channel, peak
        self._seconds: list[float] = []

    def step(self, step_s: float) -> None:
        """Note one step; the last one that counts sends the event."""
        if len(self._seconds) == STEPS:
            return
        self._seconds.append(step_s)
        if len(self._seconds) == STEPS:
            self._channel.send(self._event())

    def _event(self) -> PlanEvent:
        peak = self._peak
        found = check_plan(self._plan, self._stage, self._seconds, peak.bytes(), is_of_process=peak.is_of_process)
        return PlanEvent(
            predicted_step_s=found.predicted_step_s,
            measured_step_s=found.measured_step_s,
            step_error=found.step_error,
            predicted_bytes=found.predicted_bytes,
            measured_bytes=found.measured_bytes,
            memory_error=found.memory_error,
            line=found.line(),
        )


def planned_job(config: TrainerConfig, model: ModelConfig) -> Job:
    """Return the run as the plan's arithmetic sees it."""
    return Job.from_config(config.model_dump(), ModelSize.from_fields(asdict(model)))


def plan_run(config: TrainerConfig, model: ModelConfig, device: torch.device) -> Plan:
    """Make the plan of a run for the GPU that it has; without a known GPU it has no time."""
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return make_plan(planned_job(config, model), gpu)


def choose_layers(
    config: TrainerConfig, model: ModelConfig, stage: tuple[int, int] | None = None
) -> tuple[LayerChoice, ...]:
    """Return what backward computes again in each layer, as the plan has solved it.

    `stage`: number of a stage of a pipeline and of its layers; None: all layers of the model.

    Raises:
        ConfigError: the budget of activations cannot be met, or the model does not fit the layout; the message shows
            why.
    """
    try:
        job = planned_job(config, model)
        return layer_choices(job) if stage is None else stage_choices(job, *stage)
    except BudgetTooSmall as error:
        raise ConfigError(f"memory.activationBudgetGiB {config.memory.activation_budget_gib}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"parallelism: {error}") from error
