"""Executors: they take the engine's steps and compute them in this process, on a device or on several ranks.

Made by `core.build`, called by the engine, one step after the other. No scheduler and no request here.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

from stoker.engine.execution.step import StepInput, StepOutput


class RankState(NamedTuple):
    """One of several ranks."""

    rank: int
    pid: int
    steps: int
    """Steps whose tokens it knows."""
    silence_s: float
    """Since its last sign of life."""


class LaunchedOutput(Protocol):
    """The output of a step that is computed beside the host."""

    @property
    def duration_s(self) -> float | None:
        """Time that the step was computed for, once its result has been read; None: not known."""
        ...

    def result(self) -> StepOutput:
        """Wait for the output. Raises the step's error, or `ExecutorLost` if no further step can be computed."""
        ...


PendingOutput = Future[StepOutput] | LaunchedOutput
"""A submitted step's output."""


def duration_of(pending: PendingOutput) -> float | None:
    """The time that a step whose result has been read was computed for; None where it was not beside the host."""
    return None if isinstance(pending, Future) else pending.duration_s


def is_computed(pending: PendingOutput) -> bool:
    """Whether the step was computed while it was submitted, as `InProcess` does."""
    return isinstance(pending, Future) and pending.done()


class StepRunner(Protocol):
    """One rank: `Runner`, or a test's own class."""

    def run(self, step: StepInput) -> StepOutput: ...


class StepLauncher(Protocol):
    """One rank whose device computes beside the host."""

    def launch(self, step: StepInput) -> PendingOutput: ...
    def capture_next_graph(self, *, wanted: bool = False) -> bool: ...


class Executor(Protocol):
    """Computes steps in order. A later step may be submitted before an earlier one's output is read."""

    def submit(self, step: StepInput) -> PendingOutput:
        """Start a step. Errors are raised by the result, never here."""
        ...

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        """Capture one more CUDA graph between two steps, a fraction of a second. False: none is left to capture.

        `wanted`: only one whose lack has cost much.
        """
        ...

    def check(self) -> None:
        """Raise ExecutorLost where no further step can be computed, although none is under way."""
        ...

    def rank_states(self) -> tuple[RankState, ...]:
        """The ranks as of now; none for one rank in this process."""
        ...

    def close(self) -> None:
        """Release processes and memory. May be called twice."""
        ...


class SharedSteps(Protocol):
    """An executor whose steps begin when other ranks with requests of their own take part."""

    @property
    def wake_fd(self) -> int:
        """Readable when another rank asks for a step."""
        ...

    def take_part(self) -> None:
        """Compute a step for the others, if they wait for this rank. Raises ExecutorLost."""
        ...


class InProcess:
    """One rank in this process: the step is done when `submit` returns."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner

    def submit(self, step: StepInput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        try:
            future.set_result(self.runner.run(step))
        except Exception as error:  # noqa: BLE001 - the future carries it to who waits
            future.set_exception(error)
        return future

    def capture_next_graph(self, *, wanted: bool = False) -> bool:  # noqa: ARG002 - nothing is captured
        return False

    def check(self) -> None:
        pass

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    def close(self) -> None:
        pass


class OnDevice:
    """One rank in this process whose device computes while the host goes on."""

    def __init__(self, runner: StepLauncher) -> None:
        self.runner = runner

    def submit(self, step: StepInput) -> PendingOutput:
        try:
            return self.runner.launch(step)
        except Exception as error:  # noqa: BLE001 - the result carries it to who waits
            return failed(error)

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        return self.runner.capture_next_graph(wanted=wanted)

    def check(self) -> None:
        pass

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    def close(self) -> None:
        pass


def failed(error: Exception) -> Future[StepOutput]:
    future: Future[StepOutput] = Future()
    future.set_exception(error)
    return future
