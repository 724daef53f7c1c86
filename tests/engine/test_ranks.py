"""Two ranks that share every layer answer as one does; a lost one is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.config import CacheConfig, EngineConfig, EngineParallelismConfig, SchedulerConfig, ServedModelConfig
from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.ranks import Ranks
from stoker.engine.sampling import SamplingParams

PROMPTS = [[5, 6, 7] * 5, [100, 3], list(range(40, 70))]


def engine_of(folder: Path, tensor: int) -> LLMEngine:
    config = EngineConfig(
        model=ServedModelConfig(path=str(folder), dtype="float32"),
        device="cpu",
        threads=1,
        cache=CacheConfig(num_blocks=100, block_size=4),
        scheduler=SchedulerConfig(max_batch_tokens=16, max_requests=4),
        parallelism=EngineParallelismConfig(tensor=tensor),
    )
    return build_engine(config)[0]


def answers(engine: LLMEngine) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Return (token, logprob) of every choice: greedy, drawn and forked."""
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=0.9 * index, seed=index, n=1 + index, max_tokens=8, ignore_eos=True, logprobs=0
        )
        engine.add_request(str(index), prompt, params)
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.logprobs is not None
            entries = zip(delta.tokens, (entry.logprob for entry in delta.logprobs), strict=True)
            found.setdefault((delta.request_id, delta.choice), []).extend(entries)
    return found


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Callable[[Any], LLMEngine]]:
    """Start an engine of two ranks over a twin's weights in `tmp_path`."""
    threads = torch.get_num_threads()
    started: list[LLMEngine] = []

    def start(twin: Any) -> LLMEngine:
        twin.save_pretrained(tmp_path)
        started.append(engine_of(tmp_path, 2))
        return started[0]

    yield start
    for engine in started:
        engine.executor.close()
    torch.set_num_threads(threads)


def assert_equal_one_rank(engine: LLMEngine, folder: Path) -> None:
    assert isinstance(engine.executor, Ranks)
    one, two = answers(engine_of(folder, 1)), answers(engine)
    assert {key: [token for token, _ in entries] for key, entries in two.items()} == {
        key: [token for token, _ in entries] for key, entries in one.items()
    }
    for key, entries in two.items():
        assert [logprob for _, logprob in entries] == pytest.approx([logprob for _, logprob in one[key]], abs=1e-4)


def test_two_ranks_equal_one(two_ranks: Callable[[Any], LLMEngine], twins: dict[str, Any], tmp_path: Path) -> None:
    assert_equal_one_rank(two_ranks(twins["qwen3"]), tmp_path)


def test_two_ranks_equal_one_until_one_dies(
    two_ranks: Callable[[Any], LLMEngine], twins: dict[str, Any], tmp_path: Path
) -> None:
    engine = two_ranks(twins["llama"])
    assert_equal_one_rank(engine, tmp_path)
    assert isinstance(engine.executor, Ranks)
    engine.add_request("a", [3, 4], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    engine.step()
    (worker,) = engine.executor.workers
    worker.kill()
    worker.join()
    with pytest.raises(ExecutorLost, match="rank 1 ended with -9"):
        engine.step()
