"""The engine with `attention: flash`: what it computes with a stand-in for flash-attn-4, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stoker.engine.config import EngineConfig
from stoker.engine.core.kernel_warmup import kernel_warmup
from stoker.engine.plan import EnginePlan, count_blocks, prompt_bytes
from stoker.model.config import ModelConfig
from stoker.model.kernels.kernel_set import MissingKernel, has_flash
from stoker.model.kernels.long_prompts import PromptAttention
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from testing.model import interpreted
from testing.model.plain_attention import PlainVarlen
from tests.engine.test_step_graphs import Poisoned, answers, engine_of, make_twin

REQUESTS = [(18, 8, 0), (12, 1, 2), (18, 7, 3), (17, 6, 5)]
"""(prompt's length, kind, step of arrival): whole prompts, beside decodes, and two that begin as the first did."""


def check_engine(chunk: int | None, fewest: int, ungraphed: int) -> None:
    """Compare with the reference. Chunks of 5 tokens have at most 80 pairs, whole prompts of 18 tokens have 171."""
    twin = make_twin()
    setting: dict[str, Any] = {"num_blocks": 40, "chunk": chunk, "deterministic": False}
    capture, stand_in = Poisoned(), PlainVarlen()
    prompts = PromptAttention(stand_in, fewest, ungraphed)
    engine = engine_of(twin, kernels="fused", graphs=capture, long_prompts=prompts, **setting)
    capture.runner = engine.executor.runner
    found = answers(engine, REQUESTS)
    wanted = answers(engine_of(twin, kernels="reference", graphs=False, **setting), REQUESTS)
    assert {key: (tokens, reason) for key, (tokens, _, reason) in found.items()} == {
        key: (tokens, reason) for key, (tokens, _, reason) in wanted.items()
    }
    for key, (_, scores, _) in found.items():
        assert np.allclose(scores, wanted[key][1], atol=1e-4), key
    assert engine.scheduler.prefix_hits > 0
    assert stand_in.calls > 0
    graphs = engine.executor.runner.graphs.graphs
    assert any(not shape.prompts for shape in graphs)
    assert any(shape.prompts for shape in graphs) == (ungraphed > 1), "steps with little work keep their graphs"


def test_prompts_by_a_stand_in_answer_as_the_reference() -> None:
    interpreted.run([(check_engine, (None, 1, 1)), (check_engine, (5, 20, 60)), (check_engine, (None, 1, 150))])


def config_of(**given: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": "m"}, **given})


def test_the_plan_keeps_memory_for_the_keys_of_the_longest_prompt(twins: dict[str, Any]) -> None:
    model = ModelConfig.from_hugging_face(twins["llama"].config.to_dict())
    block = KVCache.block_bytes(model, block_size=16, dtype=torch.bfloat16)
    config = config_of(attention="flash", scheduler={"max_model_len": 160, "max_batch_tokens": 64}, cache={})
    kept = prompt_bytes(config, model, torch.bfloat16)
    assert kept == 2 * 160 * model.num_kv_heads * model.head_dim * 2
    plain = count_blocks(config, model, 16, torch.bfloat16, "cpu", 2**24)
    less = count_blocks(config, model, 16, torch.bfloat16, "cpu", 2**24, 2**23)
    assert (plain - less) * block == pytest.approx(0.9 * 2**23, abs=block)


def test_flash_is_refused_before_anything_is_loaded(twins: dict[str, Any]) -> None:
    model = ModelConfig.from_hugging_face(twins["llama"].config.to_dict())
    plan = EnginePlan("", None, "cpu", torch.bfloat16, "fused", "flash", False, 1, 16, 100, 160, 256, 16, 1)
    for dtype, reason in ((torch.float32, r"does not take torch\.float32"), (torch.bfloat16, "is not installed")):
        if dtype is torch.bfloat16 and has_flash():
            continue
        with (
            pytest.raises(MissingKernel, match=f"attention: 'flash' .*{reason}"),
            kernel_warmup(replace(plan, dtype=dtype), model, Ops("fused"), torch.device("cpu")),
        ):
            pass


@pytest.mark.gpu
def test_flash_is_compiled_by_the_kernel_warmup() -> None:
    pytest.importorskip("flash_attn.cute")
    model = ModelConfig.from_hugging_face(make_twin().config.to_dict())
    plan = EnginePlan("", None, "cuda", torch.bfloat16, "fused", "flash", False, 1, 64, 100, 160, 256, 16, 1)
    with kernel_warmup(plan, model, Ops("fused"), torch.device("cuda", torch.cuda.current_device())):
        pass
