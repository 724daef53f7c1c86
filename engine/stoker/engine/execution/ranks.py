"""Tensor-parallel ranks: rank 0 in this process, each further one in a process of its own that gets the same steps.

Steps travel through pipes from parent to children; the ranks exchange tensors through their group. If one of them
fails, none can go on: `ExecutorLost`.

Made by `core.build` as the executor of a tensor-parallel engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.load import Progress, load_runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.plan import EnginePlan

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""Longest wait of ranks for each other, until they count as lost."""
STOP_TIMEOUT_S = 5.0


class Ranks:
    """`plan.tensor` ranks that run every step together. One engine per process: the group is torch's default one."""

    def __init__(self, plan: EnginePlan, progress: Progress = lambda _: None) -> None:
        """Start the other ranks and load this one. Raises ExecutorLost if a rank cannot start."""
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-ranks-")
        meeting = Path(self._folder.name, "store")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.workers: list[BaseProcess] = []
        for rank in range(1, plan.tensor):
            ours, theirs = context.Pipe()
            worker = context.Process(target=work, args=(plan, rank, meeting, theirs), name=f"rank {rank}", daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self.workers.append(worker)
        try:
            self._runner = load_runner(plan, join(plan, 0, meeting), progress)
            for pipe in self._pipes:
                pipe.recv()  # ready
        except Exception as error:
            self.close()
            raise ExecutorLost(f"the ranks cannot start: {error}") from error

    def submit(self, step: StepInput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        try:
            for pipe in self._pipes:
                pipe.send(step)
            future.set_result(self._runner.run(step))
        except Exception as error:  # noqa: BLE001 - the future carries it to who waits
            ended = [f"{worker.name} ended with {worker.exitcode}" for worker in self.workers if not worker.is_alive()]
            lost = ExecutorLost("; ".join([f"{type(error).__name__}: {error}", *ended]))
            lost.__cause__ = error
            future.set_exception(lost)
        return future

    def capture_next_graph(self, *, wanted: bool = False) -> bool:  # noqa: ARG002 - nothing is captured
        return False

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker ends when its pipe does
        for worker in self.workers:
            worker.join(STOP_TIMEOUT_S)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._pipes, self.workers = [], []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


def join(plan: EnginePlan, rank: int, meeting: Path) -> ProcessGroup:
    """Join the group as this rank. Returns when all ranks have joined."""
    store = dist.FileStore(str(meeting), plan.tensor)  # type: ignore[attr-defined]
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=plan.tensor, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=plan.tensor, timeout=COLLECTIVE_TIMEOUT, pg_options=loopback()
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def loopback() -> Any:
    """Options of Gloo for this machine's loopback interface."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = COLLECTIVE_TIMEOUT
    return options


def work(plan: EnginePlan, rank: int, meeting: Path, pipe: Connection) -> None:
    """Run a further rank: compute the steps of the pipe until it closes. An error ends the rank, and so the group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    runner = load_runner(plan, join(plan, rank, meeting))
    pipe.send("ready")
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            break
        runner.run(step)
    os._exit(0)  # the parent is gone or has closed: no result to deliver, and no collective may be waited for
