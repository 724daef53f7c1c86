"""Ranks that hold a model's layers one behind the other answer as one rank does, however their steps are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from stoker.engine.core.engine import LLMEngine
from stoker.engine.ranks.executor import Ranks
from stoker.engine.sampling import SamplingParams
from testing.engine.poisoned import check_a_bad_request_alone_fails
from testing.engine.rank_engines import Answers, answers, beside, closed, saved, started
from tests.engine.conftest import SHAPE

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3 of three layers, with a tied table and a tokenizer."""
    torch.manual_seed(7)
    config = transformers.Qwen3Config(**SHAPE | {"num_hidden_layers": 3})
    return saved(transformers.Qwen3ForCausalLM(config).eval(), tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Answers:
    return answers(started(folder, 1))


@pytest.fixture(scope="module")
def three_stages(folder: Path) -> Iterator[LLMEngine]:
    engine = started(folder, 1, pipeline=3)
    yield engine
    closed(engine)


def test_stages_have_the_bits_of_one_rank(three_stages: LLMEngine, one_rank: Answers) -> None:
    """With three steps in flight: greedy, seeded, forked, scored and constrained answers, and tokens of the cache."""
    assert three_stages.scheduler.flight.stages == 3
    assert answers(three_stages) == one_rank
    hits = three_stages.scheduler.prefix_hits
    assert answers(three_stages, turn="-again") == one_rank
    assert three_stages.scheduler.prefix_hits > hits


def test_so_they_have_with_small_chunks_little_cache_and_steps_launched_ahead(
    three_stages: LLMEngine, one_rank: Answers
) -> None:
    for overlap in (False, True):
        flying = beside(three_stages, overlap=overlap, stages=3)
        assert answers(flying) == one_rank
        scarce = beside(three_stages, overlap=overlap, num_blocks=24, stages=3)
        assert answers(scarce) == one_rank
        assert scarce.scheduler.num_preemptions > 0


def test_a_seat_taken_again_does_not_get_the_tokens_of_the_one_before(
    three_stages: LLMEngine, one_rank: Answers
) -> None:
    """Requests are aborted while their steps are in flight, and others take their seats at once."""
    flying = beside(three_stages, overlap=True, stages=3)
    for turn in range(3):
        for number in range(6):
            flying.add_request(f"gone-{turn}-{number}", [3 + number] * (4 + turn), LONG)
        for _ in range(4 + turn):
            flying.step()
        for number in range(6):
            flying.abort_request(f"gone-{turn}-{number}")
        assert answers(flying, turn=f"-{turn}") == one_rank


def test_a_bad_request_alone_fails(three_stages: LLMEngine) -> None:
    """The last stage cannot sample it: the step is computed again without it, and those behind it, too."""
    for overlap in (False, True):
        check_a_bad_request_alone_fails(beside(three_stages, overlap=overlap, stages=3))


def test_ranks_of_all_stages_are_counted(three_stages: LLMEngine) -> None:
    assert isinstance(three_stages.executor, Ranks)
    engine = beside(three_stages, stages=3)
    answers(engine, ("greedy",))
    while engine._submitted:
        engine.step()
    workers, steps = three_stages.executor.workers, engine.stats().ranks[0].steps
    workers.wait(lambda: [rank.steps for rank in engine.stats().ranks] == [steps] * 3)  # their next signs of life
    assert not workers.digests.differing(3)
