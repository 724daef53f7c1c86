"""Data-parallel ranks that share experts, each in a process of its own as a core is, without fronts.

`python -m testing.engine.data_ranks JOB RANK` loads, answers its prompts, writes the answers, and takes part in the
others' steps until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

Turn = tuple[str, Sequence[str]]
"""What a rank does, and its prompts (`turned`)."""
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


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    logging.basicConfig(level="INFO")
    place = DataPlace(rank, len(job["turns"]), Path(job["meeting"]))
    if (port := job["port"]) is not None:
        place = replace(place, meeting=("127.0.0.1", port), key=bytes(32), host="127.0.0.1")
    engine, _ = build_engine(EngineConfig.model_validate(job["config"]), data=place)
    assert isinstance(engine.executor, DataRank)
    engine.executor.links.limits = RankLimits(silent_s=job["silent_s"])
    try:
        for turn, names in job["turns"][rank]:
            print(json.dumps(turned(engine, turn, tuple(names))), flush=True)
        follow(engine)
    except ExecutorLost as error:
        print(json.dumps(str(error)), flush=True)
    engine.close()


def follow(engine: LLMEngine) -> None:
    """Take part until the standard input ends."""
    steps = engine.shared_steps
    assert steps is not None
    while True:
        ready, _, _ = select.select([sys.stdin, steps.wake_fd], [], [], 0.05)
        engine.executor.check()
        if sys.stdin in ready and not sys.stdin.read():
            return
        steps.take_part()


@dataclass
class DataRanks:
    """The processes."""

    processes: list[subprocess.Popen[str]]

    def answer(self, rank: int) -> Any:
        """Wait for what a rank prints next, for each turn, and at last the loss of a rank."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"rank {rank} has ended"
        return json.loads(line)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def end(self) -> list[int]:
        """End all in good order; return their exit codes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        return [process.wait(30) for process in self.processes]


@contextmanager
def running(
    config: EngineConfig, turns: Sequence[Sequence[Turn]], folder: Path, silent_s: float = 20, port: int | None = None
) -> Iterator[DataRanks]:
    """Start a rank for each list of turns. `port`: at which they meet, as those of several pods do."""
    job = folder / "job.json"
    values = {"turns": turns, "meeting": str(folder / "data"), "silent_s": silent_s, "port": port}
    job.write_text(json.dumps({"config": config.model_dump(mode="json"), **values}))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "testing.engine.data_ranks", str(job)]
    ranks = DataRanks([subprocess.Popen([*command, str(rank)], **pipes) for rank in range(len(turns))])
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()


if __name__ == "__main__":
    main()
