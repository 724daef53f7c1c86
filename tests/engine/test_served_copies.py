"""`stoker serve` with two copies of a model, each a real core: both answer, as one copy does; they end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from testing.engine.rank_engines import config_of
from testing.engine.served_engine import ServedEngine, served_engine
from tests.engine.test_server_real import write_model

START_S, END_S = 400, 300
PROMPTS = ["The quick brown fox", "jumps", "over the lazy dog", "and then"]
LENGTH = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    folder = tmp_path_factory.mktemp("copies")
    write_model(folder / "tiny")
    with served_engine(folder / "tiny", "--data-parallel-size", "2") as found:
        yield found


def cores_of(parent: int) -> list[int]:
    """The processes that the server has started as cores."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if int(fields[1]) == parent and "stoker.engine.core.main" in words:
            found.append(int(folder.name))
    return found


def test_two_copies_answer_as_one_and_end_together(served: ServedEngine) -> None:
    url, process, model = served.url, served.process, served.model
    bodies = [
        {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0.8, "seed": 5, "ignore_eos": True}
        for prompt in PROMPTS
    ]

    def answer(body: dict[str, Any]) -> str:
        return str(httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(answer, bodies))
    with LLM(config_of(model, 1)) as llm:
        params = SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=5, ignore_eos=True)
        expected = [output.completions[0].text for output in llm.generate(PROMPTS, params, progress=False)]
    assert found == expected

    deadline = time.monotonic() + START_S
    while generated(status := httpx.get(f"{url}/status", timeout=60).json()) < LENGTH * len(PROMPTS):
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    assert status["total_blocks"] == 120, "each copy has its own cache"
    cores = cores_of(process.pid)
    assert len(cores) == 2
    os.kill(cores[1], signal.SIGKILL)
    process.communicate(timeout=END_S)
    assert process.returncode != 0
    assert not [core for core in cores if Path(f"/proc/{core}").exists() and _state(core) != "Z"]


def generated(status: dict[str, Any]) -> int:
    """Tokens that the cores have reported."""
    load = status.get("load")
    return 0 if load is None else int(load["generated"])


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
