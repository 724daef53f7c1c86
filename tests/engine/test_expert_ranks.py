"""Ranks that share a model's experts, whole or cut, answer as one rank does; also over two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.engine import LLMEngine
from stoker.engine.ranks.executor import Ranks
from testing.engine.poisoned import check_a_bad_request_alone_fails
from testing.engine.rank_engines import Answers, answers, beside, closed, saved, started, tokens_of


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3-moe of two layers with eight experts."""
    return saved(twins["qwen3-moe"], tmp_path_factory.mktemp("experts"))


def test_experts_over_tensor_ranks_of_two_stages_equal_one_rank(folder: Path) -> None:
    """Four ranks: two stages of two, each with half of its layer's experts and half of its heads."""
    expected = answers(started(folder, 1))
    engine = started(folder, 2, pipeline=2, expert=2)
    try:
        assert own_experts(engine) == [range(4)]
        found = answers(engine)
        assert_equal(found, expected)
        flying = beside(engine, overlap=True, stages=2, num_blocks=24)
        assert answers(flying) == found
        assert flying.scheduler.num_preemptions > 0
        check_a_bad_request_alone_fails(beside(engine, stages=2))
    finally:
        closed(engine)


@pytest.mark.parametrize("layout", [{"tensor": 2, "expert": 2}, {"tensor": 1, "pipeline": 2}], ids=str)
def test_experts_over_ranks_wait_in_main_memory(layout: dict[str, int], folder: Path) -> None:
    """Two ranks, each with half of the experts of two layers or all of one, and slots for two of each layer."""
    expected = answers(started(folder, 1))
    engine = started(folder, experts={"on_device": 2}, **layout)
    try:
        assert_equal(answers(engine), expected)
        stats = engine.stats().experts
        assert stats is not None
        layers = 2 // layout.get("pipeline", 1)
        assert (stats.slots, stats.experts) == (layers * 2, 8)
        assert stats.misses > stats.slots
    finally:
        closed(engine)


def own_experts(engine: LLMEngine) -> list[range]:
    assert isinstance(engine.executor, Ranks)
    return [layer.own for layer in engine.executor._runner.model.experts()]


def assert_equal(found: Answers, expected: Answers) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for key, entries in found.items():
        assert [score for _, score in entries] == pytest.approx([score for _, score in expected[key]], abs=1e-4)
