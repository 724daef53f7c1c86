"""Two stages on two GPUs, and experts over two GPUs, answer as one GPU does; also behind captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.ranks.executor import Ranks
from stoker.engine.sampling import SamplingParams
from testing.engine.rank_engines import Answers, answers, config_of, tokens_of
from testing.engine.tiny_tokenizer import tokenizer_json

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def save(twins: dict[str, Any], name: str, folder: Path) -> None:
    twins[name].save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())


def opened(folder: Path, parallelism: dict[str, int], **more: Any) -> LLMEngine:
    cache = {"num_blocks": 100, "block_size": 16}
    engine, plan = build_engine(config_of(folder, 1, device="cuda", cache=cache, parallelism=parallelism, **more))
    assert plan.overlap
    return engine


def answered(folder: Path, parallelism: dict[str, int], **more: Any) -> Answers:
    engine = opened(folder, parallelism, **more)
    try:
        return answers(engine)
    finally:
        engine.close()


def assert_captured(engine: LLMEngine) -> None:
    """Capture all shapes, on all ranks."""
    assert isinstance(engine.executor, Ranks)
    graphs = engine.executor._runner.graphs
    assert graphs is not None
    captured = len(graphs.graphs)
    assert captured > 0
    while engine.executor.capture_next_graph():
        pass
    assert len(graphs.graphs) > captured
    assert {bool(shape.prompts) for shape in graphs.graphs} == {True, False}


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_two_stages_equal_one_gpu(kernels: str, twins: dict[str, Any], tmp_path: Path) -> None:
    save(twins, "qwen3", tmp_path)
    expected = tokens_of(answered(tmp_path, {"tensor": 1}, kernels=kernels))
    engine = opened(tmp_path, {"pipeline": 2}, kernels=kernels)
    try:
        assert engine.scheduler.flight.stages == 2
        assert tokens_of(answers(engine)) == expected
        if kernels == "fused":
            assert_captured(engine)
            assert tokens_of(answers(engine, turn="-again")) == expected
        for number in range(6):
            engine.add_request(f"gone-{number}", [3 + number] * 5, LONG)
        for _ in range(5):
            engine.step()
        for number in range(6):
            engine.abort_request(f"gone-{number}")
        assert tokens_of(answers(engine, turn="-behind")) == expected
    finally:
        engine.close()


def test_deterministic_stages_have_the_bits_of_one_gpu(twins: dict[str, Any], tmp_path: Path) -> None:
    save(twins, "qwen3", tmp_path)
    bfloat16 = {"path": str(tmp_path), "dtype": "bfloat16"}  # float32's products take minutes to compile
    expected = answered(tmp_path, {"tensor": 1}, deterministic=True, model=bfloat16)
    assert answered(tmp_path, {"pipeline": 2}, deterministic=True, model=bfloat16) == expected


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_experts_over_two_gpus_equal_one(kernels: str, twins: dict[str, Any], tmp_path: Path) -> None:
    save(twins, "qwen3-moe", tmp_path)
    expected = tokens_of(answered(tmp_path, {"tensor": 1}, kernels=kernels))
    engine = opened(tmp_path, {"tensor": 2, "expert": 2}, kernels=kernels)
    try:
        assert isinstance(engine.executor, Ranks)
        assert {len(layer.own) for layer in engine.executor._runner.model.experts()} == {4}
        assert tokens_of(answers(engine)) == expected
        if kernels == "fused":
            assert_captured(engine)
            assert tokens_of(answers(engine, turn="-again")) == expected
    finally:
        engine.close()
