"""The trainer compares its first steps with the plan, and the plan's state is what ZeRO holds."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from mmap import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.pod.causes import Cause
from stoker.pod.plan.job import Job, Layout
from stoker.pod.plan.measured import STEPS, UNSETTLED, PlanCheck
from stoker.pod.plan.memory import fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.messages import PlanEvent, StepEvent
from stoker.trainer.rank.bucket import LINE
from stoker.trainer.rank.communicator import Alone
from stoker.trainer.rank.memory_peak import RESTART_PEAK, MemoryPeak
from stoker.trainer.rank.mesh import data_parallel_mesh
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.tiny_run import TINY, RecordingChannel, alone, tiny_config, tiny_decoder, train


def test_a_run_reports_its_plan_once_after_its_first_steps(tmp_path: Path) -> None:
    context = alone()
    assert isinstance(context.channel, RecordingChannel)
    assert train(tiny_config(tmp_path, training__total_steps=STEPS + 2), context) is Cause.COMPLETED
    (plan,) = context.channel.all(PlanEvent)
    steps = context.channel.all(StepEvent)
    events = [event for event in context.channel.events if isinstance(event, PlanEvent | StepEvent)]
    assert events.index(plan) == STEPS
    assert plan.measured_step_s == statistics.median_low(step.step_s for step in steps[UNSETTLED:STEPS])
    assert plan.predicted_bytes > 0
    assert (plan.predicted_step_s, plan.step_error) == (None, None)
    assert plan.measured_bytes is not None
    assert plan.memory_error == error_of(plan.predicted_bytes, plan.measured_bytes)


def error_of(predicted: float, measured: float) -> float | None:
    return (predicted - measured) / measured if measured else None


def described(folder: Path, resident: int, highest: int) -> Path:
    """A folder that describes a process, with counters in KiB."""
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t  {highest} kB\nVmRSS:\t  {resident} kB\n")
    return folder


def test_on_a_cpu_the_growth_of_the_process_is_measured(tmp_path: Path) -> None:
    peak = MemoryPeak(torch.device("cpu"), described(tmp_path, 1000, 9000))
    assert (tmp_path / "clear_refs").read_text() == RESTART_PEAK, "a peak before the run does not count"
    described(tmp_path, 1200, 1500)
    assert peak.bytes() == 500 * 1024
    described(tmp_path, 700, 900)
    assert peak.bytes() == 0
    assert MemoryPeak(torch.device("cpu"), tmp_path / "elsewhere").bytes() is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not count the peak")
def test_memory_that_was_given_back_counts() -> None:
    peak = MemoryPeak(torch.device("cpu"))
    size = 128 * 2**20
    with mmap(-1, size) as pages:
        pages.write(bytes(size))
    assert (peak.bytes() or 0) >= size // 2


@pytest.mark.parametrize(
    ("measured", "of_process", "line"),
    [
        (2**30, False, "memory 1.0 GiB measured, 1.5 GiB predicted (+50.0%)"),
        (
            2**31,
            True,
            "memory 2.0 GiB measured as the growth of the process, buffers of libraries included, "
            "1.5 GiB predicted (-25.0%)",
        ),
        (None, True, "memory 1.5 GiB predicted, not measured: this system does not count it"),
    ],
)
def test_the_line_says_the_error_of_the_memory(measured: int | None, of_process: bool, line: str) -> None:
    found = PlanCheck(
        predicted_step_s=None,
        measured_step_s=0.5,
        predicted_bytes=1.5 * 2**30,
        measured_bytes=measured,
        is_of_process=of_process,
    )
    assert found.line().split("; ")[1] == line


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
