"""The executor of a data-parallel rank whose experts are shared with others: all compute the same numbered steps.

A step begins when all ranks have asked for it. In it each rank computes its own requests, and in every layer its
experts for the tokens of all. A rank without requests takes part with its experts alone. A step that fails at one rank
outside of an exchange is ended with the others, and can be computed again in parts; what fails within one ends the
replica.

Made by `core.build`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.load import BesideWeights, LoadRunner, Progress, load_runner
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.data_meeting import Met
from stoker.engine.ranks.rank_thread import RankThread
from stoker.engine.ranks.workers import POLL_S, STOP_S
from stoker.model.expert_peers import ExpertPeers, PeersParted

Result = TypeVar("Result")


class DataRank:
    """One rank with requests and experts of its own."""

    def __init__(
        self,
        plan: EnginePlan,
        met: Met,
        progress: Progress,
        beside_weights: BesideWeights,
        load: LoadRunner = load_runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the group and load. Takes the links over. Raises ExecutorLost, or what loading raises."""
        self.plan, self.links, self.clock = plan, met.links, clock
        self._thread = RankThread()
        self._closed = False
        self._peers: ExpertPeers | None = None
        self.links.on_lost = self._abort

        def begin() -> Runner:
            self._peers = ExpertPeers(met.join(plan.device))
            return load(plan, None, progress, beside_weights, self._peers)

        try:
            self.runner = self._wait(self._thread.submit(begin))
        except BaseException:
            self.close()
            raise

    @property
    def wake_fd(self) -> int:
        """Readable when another rank asks for a step."""
        return self.links.wake_fd

    def submit(self, step: StepInput) -> DataStep:
        return DataStep(self, self._thread.submit(lambda: self._timed(step)))

    def take_part(self) -> None:
        """Compute a step for the others, if they wait for this rank. Raises ExecutorLost."""
        if self.links.wanted:
            self.wait_step(self._thread.submit(self._serve))

    def wait_step(self, future: Future[Result]) -> Result:
        """Wait for a step. Raises its error, or ExecutorLost."""
        return self._wait(future, self.links.limits.step_s + self.links.limits.silent_s)

    def _wait(self, future: Future[Result], most_s: float | None = None) -> Result:
        since_s = self.clock()
        while True:
            with contextlib.suppress(NotYet):
                return future.result(POLL_S)
            if future.done():
                continue  # its own error is of this class
            self.links.check()
            if most_s is not None and self.clock() - since_s > most_s:
                raise ExecutorLost(f"a step of data rank {self.links.rank} has not ended for {most_s:.0f} s")

    def capture_next_graph(self, *, wanted: bool = False) -> bool:  # noqa: ARG002 - nothing is captured
        return False

    def check(self) -> None:
        self.links.check()

    def rank_states(self) -> tuple[RankState, ...]:
        return (RankState(0, os.getpid(), self.links.rounds.number, 0.0),)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        is_lost = self.links.lost is not None
        self.links.close()
        if not is_lost:
            self._thread.submit(_leave_group)
        self._thread.close(STOP_S if not is_lost else 0)

    def _abort(self) -> None:
        """End the exchanges in which this rank waits for a lost one; Gloo's end with the ranks' sockets."""
        if self._peers is not None:
            with contextlib.suppress(Exception):  # the replica ends in any case
                self._peers.abort()

    # The rank's thread.

    @property
    def peers(self) -> ExpertPeers:
        assert self._peers is not None, "made before the first step"
        return self._peers

    def _timed(self, step: StepInput) -> TimedOutput:
        self._begin(step.num_tokens)
        began_s = self.clock()
        output = self._compute(step)
        return TimedOutput(output, self.clock() - began_s)

    def _compute(self, step: StepInput) -> StepOutput:
        try:
            output = self.runner.launch(step).result()
        except ExecutorLost:
            raise
        except Exception as error:
            if self.peers.is_open or isinstance(error, PeersParted):
                raise self.links.blame(error) from error
            self._serve_rest()
            raise
        self._end(step.number)
        return output

    def _serve(self) -> None:
        self._begin(0)
        self._serve_rest()

    def _begin(self, tokens: int) -> None:
        begun = self.links.agree(tokens)
        self.peers.begin(begun.number, begun.tokens)

    @torch.inference_mode()
    def _serve_rest(self) -> None:
        """Take part in the exchanges of this step that are left, without tokens of its own."""
        number, tokens = self.peers.number, self.peers.counts[self.peers.rank]
        layers = list(self.runner.model.experts())
        try:
            for experts in layers[self.peers.calls :]:
                experts.serve_peers(self.peers, tokens)
        except Exception as error:
            raise self.links.blame(error) from error
        self._end(number)

    def _end(self, number: int) -> None:
        """Check that the step was computed alike everywhere."""
        layers = sum(1 for _ in self.runner.model.experts())
        if self.peers.calls != layers:
            raise ExecutorLost(
                f"data rank {self.links.rank} has made {self.peers.calls} of {layers} exchanges in step {number}"
            )
        try:
            self.peers.check()
        except PeersParted as error:
            raise self.links.blame(error) from error


class TimedOutput(NamedTuple):
    """A step's output, and how long it took once all ranks had asked for it.

    The wait before would count another rank's delay, and make this rank ask later for the next step.
    """

    output: StepOutput
    seconds: float


class DataStep:
    """A step of this rank."""

    def __init__(self, rank: DataRank, computing: Future[TimedOutput]) -> None:
        self._rank, self._computing = rank, computing
        self.duration_s: float | None = None

    def result(self) -> StepOutput:
        """Wait for the output. Raises ExecutorLost, or the step's own error, after which others can be computed."""
        output, self.duration_s = self._rank.wait_step(self._computing)
        return output


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
