"""The plan of a run against its first steps: predicted and measured memory and time, and the error of each."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from stoker.pod.plan.estimate import Plan
from stoker.pod.plan.gpu import GPUS

STEPS = 5
"""Steps that are compared; memory is the peak of all."""
UNSETTLED = 2
"""First steps whose time does not count: they compile kernels, the second those for other numbers of rows."""


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """Predicted and measured; what is not known is None. Errors are (predicted - measured) / measured."""

    predicted_step_s: float | None
    measured_step_s: float
    predicted_bytes: float
    measured_bytes: float | None
    is_of_process: bool = False
    """Whether the measured bytes are the growth of a process, which also holds buffers of its libraries."""

    @property
    def step_error(self) -> float | None:
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_bytes, self.measured_bytes)

    def line(self) -> str:
        """One line for a log."""
        step, error = f"plan: step {self.measured_step_s:.3g} s measured", self.step_error
        if error is not None:
            step += f", {self.predicted_step_s:.3g} s predicted ({error:+.1%})"
        else:
            step += f", none predicted (known devices: {', '.join(GPUS)})"
        if self.measured_bytes is None or self.memory_error is None:
            return f"{step}; memory {_gib(self.predicted_bytes)} predicted, not measured: this system does not count it"
        meant = " as the growth of the process, buffers of libraries included" if self.is_of_process else ""
        memory = f"{_gib(self.measured_bytes)} measured{meant}, {_gib(self.predicted_bytes)} predicted"
        return f"{step}; memory {memory} ({self.memory_error:+.1%})"


def check_plan(
    plan: Plan, stage: int, step_seconds: list[float], peak_bytes: int | None, *, is_of_process: bool = False
) -> PlanCheck:
    """Compare a plan with the first steps of a run.

    Args:
        stage: index of the measured rank on the pipeline axis.
        step_seconds: of each step from the first on, more than `UNSETTLED`. Their lower median counts: with loads that
            change, as those of experts, later steps compile, too.
        peak_bytes: most memory that the run had taken; None where the system does not count it.
        is_of_process: it is the growth of the whole process.
    """
    return PlanCheck(
        predicted_step_s=None if plan.time is None else plan.time.total,
        measured_step_s=statistics.median_low(step_seconds[UNSETTLED:]),
        predicted_bytes=plan.memory[stage].total,
        measured_bytes=peak_bytes,
        is_of_process=is_of_process,
    )


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else (predicted - measured) / measured


def _gib(count: float) -> str:
    """Show bytes as GiB, or as MiB where the first digits of GiB would be zeros."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
