"""A further rank: it loads its part of the model and computes the steps that rank 0 sends, until the link closes.

Three threads: the main one launches steps, one reads their results, which on a GPU come later, and one sends the signs
of life. No result leaves this process but the digest of the tokens.

Run by `worker_main` in a process of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import PendingOutput
from stoker.engine.execution.load import BesideWeights, LoadRunner, load_runner
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput
from stoker.engine.machine_memory import free_bytes
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import BlockCall, BlockReport, MovesBlocks
from stoker.engine.ranks.digests import extended
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.rendezvous import join
from stoker.engine.ranks.wire import Beat, Capture, Failed, Hello, Ready, Setup, Step, StepFailed, pack, unpack

log = logging.getLogger("stoker.engine")

BEAT_S = 1.0
"""Interval of signs of life."""
MAX_ERROR = 2000
"""Characters of an error that are reported."""


MakeMover = Callable[[Runner, EnginePlan, Callable[[BlockReport], None]], MovesBlocks]
"""Makes what carries out calls about a rank's part of blocks; given what reports."""


@dataclass(frozen=True)
class PodRank:
    """What is particular to a rank of another pod than the leader's."""

    local_rank: int
    """Number of its GPU in its pod."""
    localise: Callable[[EnginePlan], EnginePlan]
    """Return the plan with the model's place in this pod."""
    tell: Callable[[str], None]
    """Called with the rank's phase."""
    alive: Callable[[], bool]
    """Whether the pod's program still runs."""


def addresses(link: Link, setup: Setup) -> tuple[str, str]:
    """Return the address of rank 0 as this rank reaches it, and this rank's own towards it."""
    if link.end.family == socket.AF_UNIX:
        return setup.host, setup.host
    return str(link.end.getpeername()[0]), str(link.end.getsockname()[0])


class Worker:
    """One further rank."""

    def __init__(
        self, rank: int, device: str, link: Link, load: LoadRunner = load_runner, pod: PodRank | None = None,
        make_mover: MakeMover | None = None,
    ) -> None:  # fmt: skip
        """`pod`: what differs for a rank of another pod than the leader's. `make_mover`: makes what moves its part of
        cache blocks."""
        self.rank, self.device, self.link, self.load, self.pod = rank, device, link, load, pod
        self.local_rank = rank if pod is None else pod.local_rank
        self.make_mover = make_mover
        self._mover: MovesBlocks | None = None
        self._begun = 0
        self._done: tuple[int, int | None] = (0, None)
        """Steps whose tokens are known, and their digest: one value, because two threads use it."""
        self._results: queue.SimpleQueue[PendingOutput | None] = queue.SimpleQueue()
        self._ending = threading.Lock()

    def run(self, beside_weights: BesideWeights) -> None:
        """Compute steps until the link closes. Ends the process."""
        try:
            self._compute(beside_weights)
        except LinkClosed:
            os._exit(0)  # rank 0 has closed or ended: there is no result to deliver, and no rank to wait for
        except BaseException as error:  # noqa: BLE001 - whatever it is, rank 0 must name it
            self._fail(error)

    def _compute(self, beside_weights: BesideWeights) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(self.local_rank)
        self.link.send(pack(Hello(free_bytes(self.device))))
        threading.Thread(target=self._send_beats, name="beats", daemon=True).start()
        setup = unpack(self.link.receive())
        assert isinstance(setup, Setup)
        plan: EnginePlan = setup.plan
        if self.pod is not None:
            plan = self.pod.localise(plan)
        store, own = addresses(self.link, setup)
        group = join(self.rank, plan.ranks, plan.device, (store, setup.port), own, self.local_rank)
        runner = self.load(plan, group, beside_weights=beside_weights)
        self.link.send(pack(Ready()))
        if self.pod is not None:
            self.pod.tell("Serving")
        samples = runner.links is None or runner.links.is_last
        threading.Thread(target=self._read_results, args=(samples,), name="results", daemon=True).start()
        while True:
            match unpack(self.link.receive()):
                case Step(step=step):
                    self._begun += 1
                    self._results.put(self._launch(runner, step))
                case Capture(shape=shape):
                    runner.capture(shape)
                case call:
                    self._move_blocks(runner, plan, call)

    def _move_blocks(self, runner: Runner, plan: EnginePlan, call: BlockCall) -> None:
        if self._mover is None:
            assert self.make_mover is not None, "given by the program"
            self._mover = self.make_mover(runner, plan, lambda report: self.link.send(pack(report)))
        self._mover.do(call)

    def _launch(self, runner: Runner, step: StepInput) -> PendingOutput | None:
        """Launch a step; None where it failed. Rank 0 decides whether all ranks did, and may go on."""
        try:
            return runner.launch(step)
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever one request does to a step must not end the rank
            log.warning("rank %d fails in a step: %s", self.rank, error)
            self.link.send(pack(StepFailed(self._begun, runner.num_exchanges, _text(error))))
            return None

    def _read_results(self, samples: bool) -> None:
        digest, done = 0, 0
        try:
            while True:
                pending = self._results.get()
                digest = extended(digest, pending.result()) if pending is not None else digest
                done += 1
                self._done = (done, digest if samples else None)
        except BaseException as error:  # noqa: BLE001 - as in `run`
            self._fail(error)

    def _send_beats(self) -> None:
        pause = threading.Event()
        try:
            while self.pod is None or self.pod.alive():
                self.link.send(pack(Beat(self._begun, *self._done)))
                pause.wait(BEAT_S)
            os._exit(0)
        except LinkClosed:
            os._exit(0)  # as in `run`; the main thread may wait for a rank that has gone

    def _fail(self, error: BaseException) -> None:
        """Report the first error and end the process."""
        with self._ending:
            log.error("rank %d fails: %s", self.rank, error, exc_info=error)
            try:
                self.link.send(pack(Failed(_text(error))))
            finally:
                logging.shutdown()
                os._exit(1)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR]
