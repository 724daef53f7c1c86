"""The seam between the engine and whatever computes a step."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from stoker.engine.execution.step import StepInput, StepOutput


class PendingOutput(Protocol):
    """A step's output, sooner or later: a `Future`, or a runner's own."""

    def result(self) -> StepOutput:
        """Waits; raises what the step raised, `ExecutorLost` if nothing can be computed any more."""
        ...


class StepRunner(Protocol):
    """One rank: `Runner`, or a test's own."""

    def run(self, step: StepInput) -> StepOutput: ...


class StepLauncher(Protocol):
    """One rank on a device that works by itself."""

    def launch(self, step: StepInput) -> PendingOutput: ...
    def capture_next_graph(self) -> bool: ...


class Executor(Protocol):
    """Takes steps in order. A later step may be submitted before an earlier one's result is read."""

    def submit(self, step: StepInput) -> PendingOutput:
        """What went wrong is raised by the result, never here."""
        ...

    def capture_next_graph(self) -> bool:
        """Use idle time to make ready what will speed up later steps, a fraction of a second of it. False: nothing is left to do."""
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

    def capture_next_graph(self) -> bool:
        return False

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

    def capture_next_graph(self) -> bool:
        return self.runner.capture_next_graph()

    def close(self) -> None:
        pass


def failed(error: Exception) -> Future[StepOutput]:
    future: Future[StepOutput] = Future()
    future.set_exception(error)
    return future
