"""A further rank: it loads its part of the model and computes the steps that rank 0 sends, until the link closes.

Three threads: the main one launches steps, one reads their results, which on a GPU come later, and one sends the signs
of life. No result leaves this process but the digest of the tokens.

Run by `worker_main` in a process of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

import torch

from stoker.engine.execution.executor import PendingOutput
from stoker.engine.execution.load import BesideWeights, load_runner
from stoker.engine.plan import EnginePlan, free_bytes
from stoker.engine.ranks.digests import extended
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.rendezvous import join
from stoker.engine.ranks.wire import Beat, Failed, Hello, Ready, Setup, Step, pack, unpack

log = logging.getLogger("stoker.engine")

BEAT_S = 1.0
"""Interval of signs of life."""
MAX_ERROR = 2000
"""Characters of an error that are reported."""


class Worker:
    """One further rank."""

    def __init__(self, rank: int, device: str, link: Link) -> None:
        self.rank, self.device, self.link = rank, device, link
        self._begun = 0
        self._done = (0, 0)
        """Steps whose tokens are known, and their digest: one value, because two threads use it."""
        self._results: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
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
            torch.cuda.set_device(self.rank)
        self.link.send(pack(Hello(free_bytes(self.device))))
        threading.Thread(target=self._send_beats, name="beats", daemon=True).start()
        setup = unpack(self.link.receive())
        assert isinstance(setup, Setup)
        plan: EnginePlan = setup.plan
        group = join(self.rank, plan.tensor, plan.device, setup.port)
        runner = load_runner(plan, group, beside_weights=beside_weights)
        self.link.send(pack(Ready()))
        threading.Thread(target=self._read_results, name="results", daemon=True).start()
        while True:
            message = unpack(self.link.receive())
            assert isinstance(message, Step)
            self._begun += 1
            self._results.put(runner.launch(message.step))

    def _read_results(self) -> None:
        digest = done = 0
        try:
            while True:
                digest = extended(digest, self._results.get().result())
                done += 1
                self._done = (done, digest)
        except BaseException as error:  # noqa: BLE001 - as in `run`
            self._fail(error)

    def _send_beats(self) -> None:
        pause = threading.Event()
        try:
            while True:
                self.link.send(pack(Beat(self._begun, *self._done)))
                pause.wait(BEAT_S)
        except LinkClosed:
            os._exit(0)  # as in `run`; the main thread may wait for a rank that has gone

    def _fail(self, error: BaseException) -> None:
        """Report the first error and end the process."""
        with self._ending:
            log.error("rank %d fails: %s", self.rank, error, exc_info=error)
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
            try:
                self.link.send(pack(Failed(text)))
            finally:
                logging.shutdown()
                os._exit(1)
