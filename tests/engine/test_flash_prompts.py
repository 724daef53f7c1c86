"""The engine with `attention: flash`: what it computes with a stand-in for flash-attn-4, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.engine.cache_size import count_blocks, prompt_bytes
from stoker.engine.config import EngineConfig
from stoker.engine.core.kernel_warmup import kernel_warmup
from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.kernels.kernel_set import MissingKernel, has_flash
from stoker.model.kernels.long_prompts import PromptAttention
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from testing.model.interpreted import Interpreted
from testing.model.plain_attention import PlainVarlen
from tests.engine.test_step_graphs import answers, engine_of, make_twin

REQUESTS = [(18, 1, 0), (3, 7, 1), (18, 7, 3)]
"""(prompt's length, kind, step of arrival): a whole prompt, one beside its decodes, and one that begins as it did."""


def check_engine(chunk: int | None, fewest: int, ungraphed: int, graphs: Any) -> set[bool]:
    """Compare with the reference; return whether the captured graphs have prompts.

    Chunks of 5 tokens have at most 80 pairs, a whole prompt of 18 tokens has 171.
    """
    twin, stand_in = make_twin(), PlainVarlen()
    setting: dict[str, Any] = {"num_blocks": 40, "chunk": chunk, "deterministic": False}
    prompts = PromptAttention(stand_in, fewest, ungraphed)
    engine = engine_of(twin, kernels="fused", graphs=graphs, long_prompts=prompts, **setting)
    found = answers(engine, REQUESTS)
    wanted = answers(engine_of(twin, kernels="reference", graphs=False, **setting), REQUESTS)
    assert {key: (tokens, reason) for key, (tokens, _, reason) in found.items()} == {
        key: (tokens, reason) for key, (tokens, _, reason) in wanted.items()
    }
    assert engine.scheduler.prefix_hits > 0
    assert stand_in.calls > 0
    return {bool(shape.prompts) for shape in engine.executor.runner.graphs.graphs}


def check_engines() -> None:
    """Check whole prompts and chunks, launched one by one, and chunks of which those with little work have graphs."""
    assert check_engine(None, 1, 1, False) == set()
    assert check_engine(5, 20, 60, lambda body: body) == {False, True}


def test_prompts_by_a_stand_in_answer_as_the_reference(interpreted: Interpreted) -> None:
    interpreted.run([(check_engines, ())])


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
