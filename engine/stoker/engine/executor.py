"""The seam between the engine and whatever computes a step."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from stoker.engine.step_input import StepInput, StepOutput


class StepRunner(Protocol):
    """One rank: `Runner`, or a test's own."""

    def run(self, step: StepInput) -> StepOutput: ...


class Executor(Protocol):
    """Takes steps in order. A later step may be submitted before an earlier one's result is read."""

    def submit(self, step: StepInput) -> Future[StepOutput]:
        """The future raises what the step raised; `ExecutorLost` if nothing can be computed any more."""
        ...

    def close(self) -> None:
        """Give back processes and memory; harmless twice."""
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

    def close(self) -> None:
        pass
