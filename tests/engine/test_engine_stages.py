"""The cut of a model into an engine's stages: the weights of each, and the blocks that all have room for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.engine.cache_size import blocks_beside_weights, count_blocks
from stoker.engine.config import EngineConfig
from stoker.engine.execution.rank_place import rank_of
from stoker.engine.stage_cut import stage_layers, stage_of, stage_parameters
from stoker.model.config import ModelConfig
from stoker.model.known_shapes import LLAMA31_8B
from stoker.model.paged_attend import KVCache

TINY = ModelConfig(
    architecture="qwen3-moe",
    vocab_size=320,
    hidden_size=48,
    intermediate_size=80,
    num_layers=7,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=24,
    mlp_only_layers=(1, 4),
)
DENSE: dict[str, Any] = {
    "num_experts": None,
    "num_experts_per_token": None,
    "moe_intermediate_size": None,
    "mlp_only_layers": (),
}
MODELS = [
    TINY,
    replace(TINY, tie_embeddings=True),
    replace(TINY, architecture="qwen2", **DENSE),
    replace(TINY, architecture="llama", attention_bias=True, **DENSE),
]


def config_of(**cache: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": "/x"}, "cache": cache, "parallelism": {"pipeline": 2}})


@pytest.mark.parametrize("model", MODELS, ids=["experts", "tied", "qwen2", "biases"])
def test_the_stages_hold_all_weights_once_and_a_tied_table_twice(model: ModelConfig) -> None:
    for count in range(1, 8):
        stages = stage_layers(model, count)
        assert [layer for layers in stages for layer in layers] == list(range(7))
        twice = model.vocab_size * model.hidden_size if model.tie_embeddings and count > 1 else 0
        assert sum(stage_parameters(model, layers) for layers in stages) == model.num_parameters + twice


def test_the_cut_evens_out_the_weights_that_a_decode_step_reads() -> None:
    assert [len(layers) for layers in stage_layers(LLAMA31_8B, 2)] == [17, 15]
    assert [len(layers) for layers in stage_layers(LLAMA31_8B, 4)] == [8, 9, 9, 6]
    with pytest.raises(ValueError, match="7 layers cannot be cut into 8"):
        stage_layers(TINY, 8)


def test_the_cache_has_the_blocks_that_every_stage_has_room_for() -> None:
    layer_bytes, block_size = KVCache.block_bytes(LLAMA31_8B, block_size=64, dtype=torch.bfloat16) // 32, 64
    free = 40 * 2**30
    rooms = [(free - 2 * stage_parameters(LLAMA31_8B, layers)) / len(layers) for layers in stage_layers(LLAMA31_8B, 2)]
    config = config_of(memory_fraction=0.5)
    found = blocks_beside_weights(config, LLAMA31_8B, torch.bfloat16, free, layer_bytes, block_size)
    assert found == int(min(rooms) / 2 / layer_bytes)
    given = config_of(memory_bytes=100 * 17 * layer_bytes)
    assert count_blocks(given, LLAMA31_8B, block_size, torch.bfloat16, "cpu") == 100, "the longest stage has 17 layers"


def test_the_leader_is_in_the_last_stage_and_neighbours_share_layers() -> None:
    assert [stage_of(rank, 2, 3) for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    for rank in range(6):
        assert rank_of(stage_of(rank, 2, 3), rank % 2, 2, 3) == rank
