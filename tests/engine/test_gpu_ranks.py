"""Two ranks on two GPUs, over NCCL, answer as one GPU does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.core.build import build_engine
from testing.engine.rank_engines import answers, config_of, tokens_of
from testing.engine.tiny_tokenizer import tokenizer_json

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_two_gpus_equal_one(kernels: str, twins: dict[str, Any], tmp_path: Path) -> None:
    twins["llama"].save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    more: dict[str, Any] = {"device": "cuda", "kernels": kernels, "cache": {"num_blocks": 100, "block_size": 16}}
    one, _ = build_engine(config_of(tmp_path, 1, **more))
    expected = answers(one)
    one.close()
    two, plan = build_engine(config_of(tmp_path, 2, **more))
    try:
        assert plan.overlap
        assert tokens_of(answers(two)) == tokens_of(expected)
    finally:
        two.close()
