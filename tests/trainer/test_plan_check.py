"""The trainer compares its first steps with the plan, and the plan's state is what ZeRO holds."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.pod.causes import Cause
from stoker.pod.plan.job import Job, Layout
from stoker.pod.plan.measured import STEPS
from stoker.pod.plan.memory import fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.messages import PlanEvent, StepEvent
from stoker.trainer.rank.bucket import LINE
from stoker.trainer.rank.build import make_zero
from stoker.trainer.rank.communicator import Alone
from stoker.trainer.rank.mesh import data_parallel_mesh
from stoker.trainer.rank.plan_check import peak_bytes
from testing.trainer.tiny_run import TINY, RecordingChannel, alone, tiny_config, tiny_decoder, train


def test_a_run_reports_its_plan_once_after_its_first_steps(tmp_path: Path) -> None:
    context = alone()
    assert isinstance(context.channel, RecordingChannel)
    assert train(tiny_config(tmp_path, training__total_steps=STEPS + 2), context) is Cause.COMPLETED
    (plan,) = context.channel.all(PlanEvent)
    steps = context.channel.all(StepEvent)
    events = [event for event in context.channel.events if isinstance(event, PlanEvent | StepEvent)]
    assert events.index(plan) == STEPS
    assert plan.measured_step_s == statistics.median(step.step_s for step in steps[1:STEPS])
    assert plan.predicted_bytes > 0
    assert (plan.predicted_step_s, plan.step_error) == (None, None)
    assert (plan.measured_bytes, plan.memory_error) == (peak_bytes(torch.device("cpu")), None)


def test_a_run_that_ends_before_reports_none(tmp_path: Path) -> None:
    context = alone()
    assert isinstance(context.channel, RecordingChannel)
    train(tiny_config(tmp_path, training__total_steps=STEPS - 1, optimization__warmup_steps=0), context)
    assert context.channel.all(PlanEvent) == []


class OneOfFour(Alone):
    """The first of four ranks, for a constructor that sends nothing."""

    size = 4

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(self.size, -1)[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_planned_state_is_what_a_rank_holds(stage: int, precision: str) -> None:
    config = tiny_config(memory__zero_stage=stage, memory__precision=precision)
    zero = make_zero(config, tiny_decoder(config), data_parallel_mesh(OneOfFour()), torch.device("cpu"))
    layout = Layout(shard=4, zero_stage=stage)
    job = Job(
        model=ModelSize.from_fields(asdict(TINY)),
        layout=layout,
        global_batch_size=8,
        micro_batch_size=1,
        sequence_length=24,
        precision=precision,  # type: ignore[arg-type]
    )
    planned = fullest(job)
    moments = sum(size_of(state.exp_avg) + size_of(state.exp_avg_sq) for state in zero.states)
    masters = sum(size_of(state.master) for state in zero.states) if precision == "bf16" else 0
    weights = sum(size_of(state.bucket.flat) for state in zero.states)
    padding = 4 * 4 * LINE * len(zero.states)  # bytes of the lines that fill up each bucket, at most
    assert planned.weights <= weights <= planned.weights + padding
    assert planned.optimizer <= moments + masters <= planned.optimizer + 3 * padding
    zero.close()


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
