"""A started step, and its output as values once the device has computed it.

Made by the runner; its result is read by the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.sampler import Logprobs
from stoker.engine.execution.staging import Fetched
from stoker.engine.execution.step import StepInput, StepOutput, StepTrace, TokenLogprobs


@dataclass(frozen=True)
class StepTiming:
    """How a step was computed, and when."""

    way: str
    shape: tuple[int, int]
    begin: torch.cuda.Event | None
    """Its beginning on the device; None on a CPU."""
    before: torch.cuda.Event | None
    """The end of the step before it."""
    host_s: float
    """Time of its launch, on a CPU of the whole step."""

    def duration_s(self, fetched: Fetched) -> float:
        if self.begin is None or fetched.event is None:
            return self.host_s
        return float(self.begin.elapsed_time(fetched.event)) / 1000

    def trace(self, fetched: Fetched) -> StepTrace:
        device_ms = idle_ms = 0.0
        if self.begin is not None and fetched.event is not None:
            device_ms = self.begin.elapsed_time(fetched.event)
            idle_ms = self.before.elapsed_time(self.begin) if self.before is not None else 0.0
        return StepTrace(self.way, *self.shape, device_ms=device_ms, device_idle_ms=idle_ms)


class LaunchedStep:
    """A started step; `result` waits for the device."""

    def __init__(self, number: int, fetched: Fetched, unpack: Callable[[list[np.ndarray]], StepOutput]) -> None:
        self.number, self.fetched, self.unpack = number, fetched, unpack
        self.output: StepOutput | None = None
        self.shape: PassShape | None = None
        """The pass that it was padded to."""
        self.timing: StepTiming | None = None
        """Set by the runner, once all is launched."""

    @property
    def trace(self) -> StepTrace | None:
        """How the step was computed, once its result has been read."""
        return self.timing.trace(self.fetched) if self.timing is not None else None

    @property
    def duration_s(self) -> float | None:
        """Time that the device computed, once the result has been read."""
        return self.timing.duration_s(self.fetched) if self.timing is not None else None

    def result(self) -> StepOutput:
        """Wait for the output. Raises ExecutorLost where the device failed, because later steps would be wrong."""
        if self.output is None:
            try:
                self.output = self.unpack(self.fetched.wait())
            except torch.AcceleratorError as error:
                raise ExecutorLost(f"the device failed in step {self.number}: {error}") from error
        return self.output


def unpacked(
    step: StepInput, arrays: list[np.ndarray], wanted: Sequence[int] | None, num_parts: list[int]
) -> StepOutput:
    """Unpack a step's arrays.

    `wanted`: number of top log-probabilities by sample, -1 for none at all; None where no sample requests any.
    """
    rest = iter(arrays)
    tokens: tuple[int, ...] = ()
    valid: tuple[bool, ...] = ()
    if step.sample_seats:
        tokens, valid = tuple(next(rest).tolist()), tuple(next(rest).tolist())
    logprobs: tuple[TokenLogprobs | None, ...] = (None,) * len(tokens)
    if wanted is not None:
        entries = iter(_entries([next(rest) for _ in Logprobs._fields], [count for count in wanted if count >= 0]))
        logprobs = tuple(next(entries) if count >= 0 else None for count in wanted)
    prompts = tuple(
        tuple(entry for _ in range(count) for entry in _entries([next(rest) for _ in Logprobs._fields], None))
        for count in num_parts
    )
    return StepOutput(step.number, tokens, valid, logprobs, prompts)


def _entries(arrays: list[np.ndarray], counts: list[int] | None) -> list[TokenLogprobs]:
    """Log-probabilities as values, from chosen [rows], ranks [rows], top tokens and top logprobs [rows, k], of which
    row r gets `counts[r]`."""
    chosen, ranks, top_tokens, top = (array.tolist() for array in arrays)
    widths = counts if counts is not None else [len(row) for row in top]
    return [
        TokenLogprobs(logprob, tuple(zip(tokens[:width], values[:width], strict=True)), rank)
        for logprob, rank, tokens, values, width in zip(chosen, ranks, top_tokens, top, widths, strict=True)
    ]
