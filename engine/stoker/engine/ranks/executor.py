"""The executor over several ranks: sends each step to the further ones and computes it on rank 0, in a thread.

The thread leaves the engine's own free: it prepares the next step meanwhile, on a CPU, too, and is not lost in a
collective when a rank is.

Made by `core.build`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

import torch
import torch.distributed as dist

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.launched_step import LaunchedStep
from stoker.engine.execution.load import BesideWeights, LoadRunner, Progress, capture_first, load_runner
from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput, StepTrace
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.failures import StepFailure, StepFailures
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.ranks.rank_thread import RankThread
from stoker.engine.ranks.rendezvous import MeetingPoint
from stoker.engine.ranks.wire import Capture, Setup, Step
from stoker.engine.ranks.worker import MakeMover
from stoker.engine.ranks.workers import POLL_S, STOP_S, Workers

Result = TypeVar("Result")


class Ranks:
    """`plan.ranks` ranks that compute every step together."""

    def __init__(
        self,
        plan: EnginePlan,
        workers: Workers,
        progress: Progress,
        beside_weights: BesideWeights,
        load: LoadRunner = load_runner,
        make_mover: MakeMover | None = None,
    ) -> None:
        """Load all ranks. Takes the workers over. `make_mover`: makes what moves rank 0's part of cache blocks.

        Raises:
            ExecutorLost: a further rank cannot load or is lost.
            Exception: what rank 0's own loading raises.
        """
        self.plan, self.workers, self.load = plan, workers, load
        self._thread = RankThread()
        self._closed = False
        self._submitted = 0
        """Steps since the start."""
        workers.on_lost = self._abort
        workers.failures = StepFailures(plan.tensor)  # what requests do to a step shows in a pipeline's last stage
        self._loaded: Runner | None = None
        self.calls = RankCalls(plan.ranks, workers, self.in_order)
        """What lets ranks move their parts of cache blocks."""
        try:
            self._runner = self._load(progress, beside_weights)
        except BaseException:
            self.close()
            raise
        if make_mover is not None:
            self.calls.own = make_mover(self._runner, plan, self.calls.report)

    def _load(self, progress: Progress, beside_weights: BesideWeights) -> Runner:
        meeting = MeetingPoint(self.workers.host)
        try:
            self.workers.send(Setup(self.plan, meeting.port, meeting.host))
            loading = self._thread.submit(
                lambda: self.load(self.plan, meeting.join(self.plan.ranks, self.plan.device), progress, beside_weights)
            )
            runner = self.wait(loading)
        except RuntimeError as error:  # a collective's, too, where another rank has ended
            lost = self.workers.blame(error)
            if isinstance(error, ExecutorLost) or str(lost).startswith("rank 0:"):
                raise
            raise lost from error
        finally:
            meeting.close()
        self._loaded = runner
        self.workers.wait_ready()
        progress("CapturingGraphs")
        self.wait(self._thread.submit(lambda: capture_first(runner, self.plan.capture_s, self._capturing(runner))))
        return runner

    @property
    def runner(self) -> Runner:
        """Rank 0."""
        return self._runner

    def submit(self, step: StepInput) -> RankStep:
        self._submitted += 1
        number = self._submitted
        self.workers.send(Step(step))
        return RankStep(self, number, self._thread.submit(lambda: self._launch(number, step)))

    def _launch(self, number: int, step: StepInput) -> LaunchedStep:
        """Launch rank 0's part, in its thread."""
        try:
            return self._runner.launch(step)
        except ExecutorLost:
            raise
        except Exception as error:
            failure = StepFailure(self._runner.num_exchanges, f"{type(error).__name__}: {error}", self.workers.clock())
            self.workers.failures.report(0, number, failure)
            raise

    def wait(self, future: Future[Result]) -> Result:
        """Wait for a call in rank 0's thread. Raises its error, or ExecutorLost if a further rank is lost before."""
        while True:
            with contextlib.suppress(NotYet):
                return future.result(POLL_S)
            if not future.done():
                self.workers.check()

    def in_order(self, call: Callable[[], Result]) -> Future[Result]:
        """Call in rank 0's thread, behind the steps that were submitted."""
        return self._thread.submit(call)

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        """As `Executor`. The other ranks capture the same shape, behind the same step."""
        return self.wait(self._thread.submit(lambda: self._capture_next(wanted)))

    def _capture_next(self, wanted: bool) -> bool:
        shape = self._runner.next_capture(wanted=wanted)
        if shape is not None:
            self._capturing(self._runner)(shape)
        return shape is not None

    def _capturing(self, runner: Runner) -> Callable[[PassShape], None]:
        """Return what captures a shape on all ranks; for rank 0's thread, while the engine's waits for it."""

        def capture(shape: PassShape) -> None:
            self.workers.send(Capture(shape))
            runner.capture(shape)

        return capture

    def check(self) -> None:
        self.workers.check()

    def rank_states(self) -> tuple[RankState, ...]:
        return (RankState(0, os.getpid(), self.workers.digests.steps, 0.0), *self.workers.states())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.workers.close()
        self.calls.close()
        self._thread.submit(self._leave_group)
        self._thread.close(STOP_S)

    def _abort(self) -> None:
        """End the exchanges in which rank 0 waits for a lost rank; Gloo's end with the ranks' sockets."""
        with contextlib.suppress(Exception):  # the group may be half made, and the replica ends in any case
            if self._loaded is not None and (self._loaded.sums is not None or self._loaded.links is not None):
                self._loaded.abort()
            elif self.plan.device == "cuda" and dist.is_initialized():
                dist.group.WORLD._get_backend(torch.device("cuda")).abort()  # type: ignore[union-attr]

    def _leave_group(self) -> None:
        """Leave the group, in rank 0's thread. Graphs hold the group's communicator, so they go first."""
        if dist.is_initialized():
            if self._loaded is not None and self._loaded.links is not None:
                self._loaded.links.abort()  # a step whose result was not read may wait for a rank that has ended
            if self._loaded is not None and self._loaded.graphs is not None:
                self._loaded.graphs.graphs.clear()
            dist.destroy_process_group()


class RankStep:
    """A step that all ranks compute."""

    def __init__(self, ranks: Ranks, number: int, launching: Future[LaunchedStep]) -> None:
        self._ranks, self._number, self._launching = ranks, number, launching
        self._output: StepOutput | None = None

    @property
    def trace(self) -> StepTrace | None:
        """How rank 0 computed the step, once its result has been read."""
        return self._launching.result().trace if self._output is not None else None

    @property
    def duration_s(self) -> float | None:
        """Time that rank 0 computed the step, once its result has been read."""
        return self._launching.result().duration_s if self._output is not None else None

    def result(self) -> StepOutput:
        """Wait for rank 0's output. Steps are read in order.

        Raises:
            ExecutorLost: names the rank.
            Exception: the step's own error, in which all ranks have failed alike; they can compute others.
        """
        if self._output is None:
            self._output = self._read()
        return self._output

    def _read(self) -> StepOutput:
        workers = self._ranks.workers
        workers.watch.step_since_s = workers.clock()
        try:
            output = self._ranks.wait(self._launching).result()
        except Exception as error:
            if not isinstance(error, ExecutorLost) and self._launching.exception() is error:
                workers.wait(lambda: workers.failures.settled(self._number))
                workers.digests.skip()
                raise
            raise workers.blame(error) from error  # the others may have gone on, so the ranks have parted
        finally:
            workers.watch.step_since_s = None
        workers.check()  # an aborted collective gives numbers, too
        workers.digests.read(output)
        return output
