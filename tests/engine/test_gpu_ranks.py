"""Two ranks on two GPUs answer as one GPU does, with captured steps and one-shot sums; a bad request alone fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.core.build import build_engine
from stoker.engine.core.deltas import Addressed
from stoker.engine.core.engine import LLMEngine
from stoker.engine.execution.dealt_draw import SHARE_ROWS
from stoker.engine.execution.peer_sums import PeerSums
from stoker.engine.ranks.executor import Ranks
from stoker.engine.sampling import SamplingParams
from testing.engine.poisoned import check_a_bad_request_alone_fails
from testing.engine.rank_engines import answers, config_of, tokens_of
from testing.engine.tiny_tokenizer import tokenizer_json

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def save(twins: dict[str, Any], folder: Path) -> None:
    twins["llama"].save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())


def opened(folder: Path, tensor: int, **more: Any) -> LLMEngine:
    cache = {"cache": {"num_blocks": 100, "block_size": 16}}
    engine, plan = build_engine(config_of(folder, tensor, device="cuda", **cache, **more))
    assert plan.overlap
    return engine


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_two_gpus_equal_one(kernels: str, twins: dict[str, Any], tmp_path: Path) -> None:
    """Also behind captured graphs, whose shapes all ranks have in common."""
    save(twins, tmp_path)
    one = opened(tmp_path, 1, kernels=kernels)
    expected = tokens_of(answers(one))
    one.close()
    two = opened(tmp_path, 2, kernels=kernels)
    try:
        assert isinstance(two.executor, Ranks)
        runner = two.executor._runner
        assert tokens_of(answers(two)) == expected
        if kernels == "fused":
            assert isinstance(runner.sums, PeerSums)
            assert runner.graphs is not None
            captured = len(runner.graphs.graphs)
            assert captured > 0
            while two.executor.capture_next_graph():
                pass
            assert len(runner.graphs.graphs) > captured
            assert {bool(shape.prompts) for shape in runner.graphs.graphs} == {True, False}
            assert tokens_of(answers(two, turn="-again")) == expected
        check_a_bad_request_alone_fails(two)
        assert tokens_of(answers(two, turn="-behind")) == expected
    finally:
        two.close()


def test_samples_beside_prompts_are_those_of_one_gpu(twins: dict[str, Any], tmp_path: Path) -> None:
    """Sixteen and more of them are dealt to the ranks, each of which samples its share."""
    save(twins, tmp_path)
    crowd = {"scheduler": {"max_batch_tokens": 128, "max_requests": 40}, "cache": {"num_blocks": 400}}
    one = build_engine(config_of(tmp_path, 1, device="cuda", **crowd))[0]
    expected = answers_of_crowd(one)
    one.close()
    two = build_engine(config_of(tmp_path, 2, device="cuda", **crowd))[0]
    try:
        assert isinstance(two.executor, Ranks)
        sums = two.executor.runner.sums
        assert sums is not None
        dealt_before = sums.dealt_rows
        assert answers_of_crowd(two) == expected
        steps_of_crowd = 20  # requests that begin beside sixteen and more others
        assert sums.dealt_rows - dealt_before >= steps_of_crowd * SHARE_ROWS
    finally:
        two.close()


def answers_of_crowd(engine: LLMEngine) -> dict[str, list[int]]:
    """The tokens of 36 requests, of which one more begins with each step."""
    tokens: dict[str, list[int]] = {}
    for number in range(36):
        params = SamplingParams(
            temperature=(0.0, 0.8)[number % 2], seed=number, top_p=(1.0, 0.9)[number % 3 == 0], max_tokens=40,
            ignore_eos=True,
        )  # fmt: skip
        prompt = [(7 * number + place) % 200 + 3 for place in range(5 + 3 * number)]
        engine.add_request(str(number), prompt, params)
        collect(engine.step(), tokens)
    while engine.has_unfinished:
        collect(engine.step(), tokens)
    return tokens


def collect(deltas: list[Addressed], tokens: dict[str, list[int]]) -> None:
    for _, delta in deltas:
        assert delta.error is None
        tokens.setdefault(delta.request_id, []).extend(delta.tokens)


def test_deterministic_answers_do_not_depend_on_the_batch(twins: dict[str, Any], tmp_path: Path) -> None:
    save(twins, tmp_path)
    bfloat16 = {"path": str(tmp_path), "dtype": "bfloat16"}  # float32's products take minutes to compile
    two = opened(tmp_path, 2, deterministic=True, model=bfloat16)
    try:
        together = answers(two)
        for name in ("greedy", "seeded", "scored"):
            alone = answers(two, (name,), turn="-alone")
            assert alone == {key: found for key, found in together.items() if key[0] == name}
    finally:
        two.close()
