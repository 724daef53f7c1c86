"""Two ranks that share every layer answer as one does, however their steps are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.executor import Ranks
from stoker.engine.worker_program import load_and_spare
from testing.engine.poisoned import check_a_bad_request_alone_fails
from testing.engine.rank_engines import PROMPTS, Answers, answers, beside, config_of, tokens_of
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
def two_ranks(folder: Path) -> Iterator[LLMEngine]:
    engine, plan = build_engine(config_of(folder, 2, deterministic=True))
    assert (plan.tensor, plan.num_blocks) == (2, 100)
    yield engine
    engine.close()
    assert isinstance(engine.executor, Ranks)
    assert [process.returncode for process in engine.executor.workers.processes.values()] == [0], "none was killed"


def assert_equal(found: Answers, expected: Answers, tolerance: float) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for key, entries in found.items():
        scores = [score for _, score in expected[key]]
        assert [score for _, score in entries] == pytest.approx(scores, abs=tolerance), key


def test_two_ranks_equal_one(two_ranks: LLMEngine, one_rank: Answers) -> None:
    assert isinstance(two_ranks.executor, Ranks)
    assert_equal(answers(two_ranks), one_rank, 1e-4)


def test_answers_have_the_same_bits_in_any_batch_chunk_cache_and_overlap(two_ranks: LLMEngine) -> None:
    """What deterministic mode guarantees over two ranks."""
    whole = answers(beside(two_ranks, budget=64))
    for name in PROMPTS:
        alone = beside(two_ranks)
        assert answers(alone, (name,)) == {key: entries for key, entries in whole.items() if key[0] == name}
    cached = beside(two_ranks)
    assert answers(cached, turn="-first") == whole
    hits = cached.scheduler.prefix_hits
    assert answers(cached, turn="-again") == whole
    assert cached.scheduler.prefix_hits > hits
    assert answers(beside(two_ranks, overlap=True)) == whole
    scarce = beside(two_ranks, overlap=True, num_blocks=18)
    assert answers(scarce) == whole
    assert scarce.scheduler.num_preemptions > 0


def test_a_bad_request_alone_fails(two_ranks: LLMEngine) -> None:
    """The step is computed again without it, by both ranks; overlapped, the step behind it, too."""
    for overlap in (False, True):
        check_a_bad_request_alone_fails(beside(two_ranks, overlap=overlap))


def test_the_ranks_are_counted(two_ranks: LLMEngine) -> None:
    engine = beside(two_ranks)
    assert isinstance(engine.executor, Ranks)
    answers(engine, ("greedy",))
    workers, steps = engine.executor.workers, engine.stats().ranks[0].steps
    assert steps >= 8
    workers.wait(lambda: engine.stats().ranks[1].steps == steps)  # its next sign of life reports it
    first, second = engine.stats().ranks
    assert (first.rank, second.rank, second.pid) == (0, 1, workers.processes[1].pid)
    assert not workers.digests.differing(2)
    engine.executor.check()


def test_a_rank_spares_what_it_has_loaded_from_collections() -> None:
    """All other ranks would wait for a collection of its modules."""
    before, runner, plan = gc.get_freeze_count(), cast("Runner", object()), cast("EnginePlan", object())
    given: list[object] = []

    def load(*arguments: object, **others: object) -> Runner:
        given.extend((*arguments, others))
        return runner

    try:
        assert load_and_spare(plan, None, load=load, beside_weights=None) is runner
        assert given == [plan, None, {"beside_weights": None}]
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
