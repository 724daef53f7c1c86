"""Ranks that hold a model's layers one behind the other answer as one rank does, however their steps are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.ranks.executor import Ranks
from testing.engine.rank_engines import Answers, answers, beside, config_of
from testing.engine.tiny_tokenizer import tokenizer_json


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3 with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    twins["qwen3"].save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Answers:
    engine, _ = build_engine(config_of(folder, 1, deterministic=True))
    return answers(engine)


@pytest.fixture(scope="module")
def two_stages(folder: Path) -> Iterator[LLMEngine]:
    engine, plan = build_engine(config_of(folder, 1, deterministic=True, parallelism={"pipeline": 2}))
    assert (plan.tensor, plan.pipeline, plan.ranks, plan.num_blocks) == (1, 2, 2, 100)
    yield engine
    engine.close()
    assert isinstance(engine.executor, Ranks)
    assert [process.returncode for process in engine.executor.workers.processes.values()] == [0], "none was killed"


def test_two_stages_have_the_bits_of_one_rank(two_stages: LLMEngine, one_rank: Answers) -> None:
    assert answers(two_stages) == one_rank


def test_so_they_have_with_steps_in_flight_small_chunks_and_little_cache(
    two_stages: LLMEngine, one_rank: Answers
) -> None:
    for overlap in (False, True):
        flying = beside(two_stages, overlap=overlap, stages=2)
        assert answers(flying) == one_rank
        hits = flying.scheduler.prefix_hits
        assert answers(flying, turn="-again") == one_rank
        assert flying.scheduler.prefix_hits > hits
        scarce = beside(two_stages, overlap=overlap, num_blocks=24, stages=2)
        assert answers(scarce) == one_rank
        assert scarce.scheduler.num_preemptions > 0
