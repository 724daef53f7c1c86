"""Data-parallel ranks that share the experts compute the same steps, and answer as one rank does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.build import build_engine
from testing.engine.data_ranks import Turn, running
from testing.engine.rank_engines import PROMPTS, answers, config_of, saved

EVERY = tuple(PROMPTS)
SHARED: dict[str, Any] = {"parallelism": {"data": 2, "expert": 2}}


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3-moe of two layers with eight experts."""
    return saved(twins["qwen3-moe"], tmp_path_factory.mktemp("experts"))


def test_ranks_that_share_experts_answer_as_one_rank(folder: Path, tmp_path: Path) -> None:
    """One rank has more to do than the other, which is idle at last; prompts come from the cache, in chunks, with
    preemptions; a request that makes a step fail fails alone, while the other rank computes or rests."""
    engine, _ = build_engine(config_of(folder, 1))
    expected = [[list(key), [list(pair) for pair in entries]] for key, entries in sorted(answers(engine).items())]
    turns: list[list[Turn]] = [
        [("plain", EVERY), ("again", EVERY), ("tight", EVERY), ("poisoned", ())],
        [("plain", ("greedy", "forked")), ("poisoned", ())],
    ]
    with running(config_of(folder, 1, **SHARED), turns, tmp_path) as ranks:
        for _ in range(3):
            assert_equal(ranks.answer(0), expected)
        assert_equal(ranks.answer(1), [one for one in expected if one[0][0] in ("greedy", "forked")])
        assert [ranks.answer(0), ranks.answer(1)] == [None, None], "as without the request that fails"
        assert ranks.end() == [0, 0]


def test_the_others_name_a_rank_that_dies_within_steps(folder: Path, tmp_path: Path) -> None:
    turns: list[list[Turn]] = [[("plain", ("greedy",)), ("long", ())]] * 2
    with running(config_of(folder, 1, **SHARED), turns, tmp_path) as ranks:
        ranks.answer(1)
        ranks.kill(0)
        assert ranks.answer(1) == "data rank 0 has ended"


def test_the_others_name_a_rank_that_hangs(folder: Path, tmp_path: Path) -> None:
    with running(config_of(folder, 1, **SHARED), [[("long", ())], [("plain", ("greedy",))]], tmp_path, 4) as ranks:
        ranks.answer(1)
        ranks.kill(1, signal.SIGSTOP)
        assert ranks.answer(0).startswith("data rank 1 is silent for ")


def test_a_rank_in_another_step_is_named_and_answers_nothing_wrong(folder: Path, tmp_path: Path) -> None:
    """Its messages have another number than the one that all have agreed on."""
    with running(config_of(folder, 1, **SHARED), [[("plain", ("greedy",))], [("astray", ())]], tmp_path) as ranks:
        assert ranks.answer(1) is None
        assert ranks.answer(0).startswith("data rank 0: PeersParted: data rank 1 is in exchange 0 of step 1 with 0 tok")


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [key for key, _ in found] == [key for key, _ in expected]
    for (key, mine), (_, theirs) in zip(found, expected, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs], key
        assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-4), key
