"""`stoker serve` over two ranks: its pages show both, its answers are one rank's, a killed rank ends it by name."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import EXIT_CODES, Cause
from testing.engine.rank_engines import config_of
from testing.engine.served_engine import ServedEngine, served_engine
from tests.engine.test_server_real import write_model

PROMPT = "The quick brown fox"
START_S, END_S = 400, 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "tiny")
    with served_engine(folder / "tiny", "--tensor-parallel-size", "2") as found:
        yield found


def test_it_serves_shows_its_ranks_and_ends_with_the_name_of_a_killed_one(
    served: ServedEngine,
) -> None:
    url, process, model = served.url, served.process, served.model
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    with LLM(config_of(model, 1)) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
        assert answer == llm.generate(PROMPT, params, progress=False)[0].completions[0].text

    status = _until(url, lambda status: len(status["ranks"]) == 2 and status["ranks"][1]["steps"] >= 12)
    ranks = status["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    metrics = httpx.get(f"{url}/metrics", timeout=120).text
    assert re.search(r'stoker:rank_steps_total\{.*rank="1"\} \d', metrics)
    assert re.search(r'stoker:rank_silence_seconds\{.*rank="0"\} 0', metrics)

    os.kill(ranks[1]["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=END_S)
    assert process.returncode == EXIT_CODES[Cause.RANK_FAILED]
    assert "stoker serve: rank 1 was killed by signal 9" in errors


def _until(url: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while not holds(status := httpx.get(f"{url}/status", timeout=120).json()):
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return dict(status)
