"""A rank that dies, hangs or cannot load ends its engine with its name, while steps run and while none does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.executor import Ranks
from stoker.engine.ranks.watch import RankLimits
from stoker.engine.ranks.workers import WorkerCommand, Workers, worker_command
from stoker.engine.sampling import SamplingParams
from testing.engine.rank_engines import config_of

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
StartTwo = Callable[..., tuple[LLMEngine, Workers]]


@pytest.fixture
def start_two(twins: dict[str, Any], tmp_path: Path) -> Iterator[StartTwo]:
    """Start an engine of two ranks."""
    started: list[LLMEngine] = []

    def start(command: WorkerCommand = worker_command, **parallelism: int) -> tuple[LLMEngine, Workers]:
        twins["llama"].save_pretrained(tmp_path)
        engine, _ = build_engine(
            config_of(tmp_path, 2, parallelism=parallelism or {"tensor": 2}),
            start=lambda size, device: Workers(size, device, command=command),
        )
        started.append(engine)
        assert isinstance(engine.executor, Ranks)
        return engine, engine.executor.workers

    yield start
    for engine in started:
        engine.close()


def gone(workers: Workers) -> list[int | None]:
    return [process.wait(300) for process in workers.processes.values()]


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_killed_rank_ends_the_step_under_way(start_two: StartTwo, parallelism: dict[str, int]) -> None:
    engine, workers = start_two(**parallelism)
    engine.add_request("a", [3, 4], LONG)
    engine.step()
    workers.processes[1].send_signal(signal.SIGKILL)
    with pytest.raises(ExecutorLost, match=r"^rank 1 was killed by signal 9$"):
        finish(engine)
    with pytest.raises(ExecutorLost, match=r"^rank 1 was killed by signal 9$"):
        engine.executor.check()
    assert gone(workers) == [-9]


def test_a_rank_that_hangs_ends_an_engine_without_work(start_two: StartTwo) -> None:
    engine, workers = start_two()
    engine.add_request("a", [3, 4], SamplingParams(max_tokens=2))
    finish(engine)
    workers.processes[1].send_signal(signal.SIGSTOP)
    workers.watch.limits = RankLimits(silent_s=3)  # from now on: it would be too short for a busy machine
    with pytest.raises(ExecutorLost, match=r"^rank 1 is silent for \d+ s$"):
        workers.wait(lambda: False)
    assert gone(workers) == [-9]
    engine.add_request("b", [3, 4], LONG)
    with pytest.raises(ExecutorLost, match=r"^rank 1 is silent"):
        engine.step()


def test_a_rank_that_cannot_load_is_named_and_leaves_nothing(start_two: StartTwo) -> None:
    def command(rank: int, device: str, link: int) -> Sequence[str]:
        return [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]

    with pytest.raises(ExecutorLost, match=r"^rank 1 was killed by signal 9$"):
        start_two(command)
