"""Several ranks (Gloo, or NCCL with one GPU each) as processes of one process group, for tests.

A world starts its processes at the first call and keeps them for the next ones; each call has a time limit of its own.

A rank that raises, dies or does not answer in time ends the call with an `AssertionError` that gives the error or the
stack of each rank. The next call begins with fresh processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from stoker.trainer.agent.stacks import innermost
from stoker.trainer.rank.process_group import process_group
from stoker.trainer.rank.rank_info import RankInfo
from testing.forked import forked
from testing.trainer.shared_network import share_network
from testing.trainer.tiny_run import tiny_config

START_S = 400.0
"""Limit for the start of the processes and `setup`: imports, rendezvous, and the communicators of NCCL."""
GRACE_S = 5.0
"""Time for the other ranks to report their errors after one has raised its own."""
LEAVE_S = 120.0
DUMP_S = 20.0

Setup = Callable[[int, int], Any]


class Rank(NamedTuple):
    """One process: requests and answers pass over `line`; on SIGUSR1 it writes its stacks to the file."""

    process: Any
    line: Connection
    stacks: Path

    def where(self) -> str:
        """Return the stacks of its threads, also while none of them runs Python."""
        if self.process.exitcode is not None:
            return f"ended with exit code {self.process.exitcode}"
        os.kill(self.process.pid, signal.SIGUSR1)
        text = written(self.stacks, time.monotonic() + DUMP_S)
        return f"stands at {innermost(text)}\n{text}"


class RankWorld:
    """A world of `size` processes in one process group.

    `setup(rank, size)` is called once in each; its result is the first argument of every call.
    """

    def __init__(
        self,
        size: int,
        setup: Setup | None = None,
        *,
        backend: str = "gloo",
        start_s: float = START_S,
    ) -> None:
        self.size = size
        self._setup, self._backend, self._start_s = setup or rank_and_size, backend, start_s
        self._ranks: list[Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Call `function(held, *args)` in every process; return the results by rank. `timeout_s` is a hard limit."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it died: the end of its line reports that
                rank.line.send((function, args))
        return self._answers(timeout_s, getattr(function, "__name__", "call"))

    def _start(self) -> None:
        context: Any = forked() if self._backend == "gloo" else multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                stacks = Path(self._folder.name, f"rank-{rank}.txt")
                stacks.write_text("")
                info = RankInfo(rank, self.size, self.size, "127.0.0.1", listener.getsockname()[1])
                work = (info, self._backend, listener if rank == 0 else None, theirs, stacks, self._setup)
                process = context.Process(target=_work, args=work, daemon=True)
                process.start()
                theirs.close()
                self._ranks.append(Rank(process, ours, stacks))
        self._answers(self._start_s, "start")

    def _answers(self, timeout_s: float, what: str) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {rank.line: index for index, rank in enumerate(self._ranks) if index not in answers}
            for line in wait(list(waiting), left):
                index = waiting[line]  # type: ignore[index]
                answers[index] = self._receive(index)
                if not answers[index][0]:
                    deadline = min(deadline, time.monotonic() + self._grace_s(index))
        if len(answers) < self.size or not all(good for good, _ in answers.values()):
            self._fail(answers, timeout_s, what)
        return [answers[index][1] for index in range(self.size)]

    def _grace_s(self, index: int) -> float:
        """Time for errors of the others beside one rank's. A rank that has died says enough, and is waited for."""
        return GRACE_S if self._ranks[index].process.exitcode is None else 0.0

    def _receive(self, index: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._ranks[index].line.recv()
        except EOFError:
            self._ranks[index].process.join(DUMP_S)
            return False, self._ranks[index].where()
        return answer

    def _fail(self, answers: dict[int, tuple[bool, Any]], timeout_s: float, what: str) -> None:
        said = []
        for index, rank in enumerate(self._ranks):
            good, answer = answers.get(index, (False, ""))
            if index not in answers:
                said.append(f"rank {index} gave no answer within {timeout_s:g} s, {rank.where()}")
            else:
                said.append(f"rank {index} {'answered' if good else answer}")
        self._kill()
        raise AssertionError(f"{what}:\n" + "\n".join(said))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.line.close()
        self._ranks = []

    def close(self) -> None:
        """Let the ranks exit; a rank that cannot is an error too."""
        for rank in self._ranks:
            with suppress(BrokenPipeError):
                rank.line.send(None)
        deadline = time.monotonic() + LEAVE_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        stuck = [f"rank {i} {rank.where()}" for i, rank in enumerate(self._ranks) if rank.process.exitcode != 0]
        self._kill()
        self._folder.cleanup()
        assert not stuck, "leave:\n" + "\n".join(stuck)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._kill()
        self.close()


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call `function(rank, size, *args)` once in `size` processes over Gloo; return the results by rank."""
    with RankWorld(size) as world:
        return world.call(partial(_spread, function), *args, timeout_s=timeout_s)


def _spread(function: Callable[..., Any], held: tuple[int, int], *args: Any) -> Any:
    return function(*held, *args)


def rank_and_size(rank: int, size: int) -> tuple[int, int]:
    return rank, size


def written(file: Path, until: float) -> str:
    """Return the file's content after it has stopped growing."""
    text = ""
    while time.monotonic() < until:
        time.sleep(0.1)
        before, text = text, file.read_text(errors="replace")
        if text and text == before:
            break
    return text


def _work(
    info: RankInfo, backend: str, listener: socket.socket | None, line: Connection, stacks: Path, setup: Setup
) -> None:
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", info.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            share_network()
        with process_group(tiny_config(), info, device, listener):
            held = setup(info.rank, info.world_size)
            line.send((True, None))
            while (order := line.recv()) is not None:
                line.send(_answer(held, *order))
        faulthandler.unregister(signal.SIGUSR1)


def _answer(held: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(held, *args)
    except BaseException:  # noqa: BLE001  # whatever it was, the test shows it
        return False, traceback.format_exc()
