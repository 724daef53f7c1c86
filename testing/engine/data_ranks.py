"""Data-parallel ranks that share experts, each in a process of its own as a core is, without fronts.

A process loads, answers its prompts, sends the answers, and takes part in the others' steps until its line is closed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.data_executor import DataRank
from stoker.engine.ranks.data_place import DataPlace
from stoker.engine.ranks.watch import RankLimits
from stoker.engine.sampling import SamplingParams
from testing.engine.poisoned import check_a_bad_request_alone_fails
from testing.engine.rank_engines import answers, beside
from testing.forked import forked

Turn = tuple[str, Sequence[str]]
"""What a rank does, and its prompts (`turned`)."""
PATIENCE_S = 120.0
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def turned(engine: LLMEngine, turn: str, names: tuple[str, ...]) -> Any:
    """Answer (`plain`, and from the prefix cache `again`), answer in small chunks with preemptions (`tight`), be one
    step ahead from now on (`astray`), go on for ever (`long`), or let a step fail (`poisoned`). Return what to print.
    """
    match turn:
        case "plain" | "again":
            return sorted(answers(engine, names, turn).items())
        case "tight":
            small = beside(engine, num_blocks=16)
            found = sorted(answers(small, names).items())
            assert small.scheduler.num_preemptions > 0
            return found
        case "astray":
            return go_astray(engine)
        case "long":
            return go_on(engine)
        case _:
            return check_a_bad_request_alone_fails(beside(engine))


def go_astray(engine: LLMEngine) -> None:
    """Number all later steps wrongly in what is sent to the others."""
    peers = engine.executor.peers  # type: ignore[attr-defined]
    begin = peers.begin
    peers.begin = lambda number, counts: begin(number + 1, counts)


def go_on(engine: LLMEngine) -> None:
    """Answer until a rank is lost."""
    while True:
        engine.add_request("long", [3, 4], LONG)
        while engine.has_unfinished:
            engine.step()


class Job(NamedTuple):
    """What all ranks are given."""

    config: EngineConfig
    turns: Sequence[Sequence[Turn]]
    meeting: Path
    silent_s: Sequence[float]
    port: int | None


def run_rank(job: Job, rank: int, line: Connection) -> None:
    """Run one rank to its end."""
    logging.basicConfig(level="INFO")
    place = DataPlace(rank, len(job.turns), job.meeting)
    if job.port is not None:
        place = replace(place, meeting=("127.0.0.1", job.port), key=bytes(32), host="127.0.0.1")
    engine, _ = build_engine(job.config, data=place)
    assert isinstance(engine.executor, DataRank)
    engine.executor.links.limits = RankLimits(silent_s=job.silent_s[rank])
    try:
        for turn, names in job.turns[rank]:
            line.send(turned(engine, turn, tuple(names)))
        follow(engine, line)
    except ExecutorLost as error:
        line.send(str(error))
    engine.close()


def follow(engine: LLMEngine, line: Connection) -> None:
    """Take part until the line is closed."""
    steps = engine.shared_steps
    assert steps is not None
    while True:
        ready, _, _ = select.select([line.fileno(), steps.wake_fd], [], [], 0.05)
        engine.executor.check()
        if line.fileno() in ready:
            return
        steps.take_part()


@dataclass
class DataRanks:
    """The processes, and a line to each."""

    processes: list[BaseProcess]
    lines: list[Connection]

    def answer(self, rank: int) -> Any:
        """Wait for what a rank answers next, for each turn, and at last the loss of a rank."""
        try:
            return self.lines[rank].recv()
        except EOFError as error:
            raise AssertionError(f"rank {rank} has ended") from error

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> list[int | None]:
        """End all in good order; return their exit codes."""
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join(300)
        return [process.exitcode for process in self.processes]


@contextmanager
def running(
    config: EngineConfig, turns: Sequence[Sequence[Turn]], folder: Path, silent_s: Sequence[float] = (),
    port: int | None = None,
) -> Iterator[DataRanks]:  # fmt: skip
    """Start a rank for each list of turns. `silent_s`: for how long each bears the silence of another one; default:
    longer than any pause of a busy machine. `port`: at which they meet, as those of several pods do."""
    job, context = Job(config, turns, folder / "data", silent_s or [PATIENCE_S] * len(turns), port), forked()
    ranks = DataRanks([], [])
    try:
        for rank in range(len(turns)):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(job, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.processes.append(process)
            ranks.lines.append(ours)
        yield ranks
    finally:
        for process, line in zip(ranks.processes, ranks.lines, strict=True):
            process.kill()
            process.join()
            line.close()
