"""Stretched rotary frequencies, and positions beyond the original context: the same logits as transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.rope_scaling import LinearScaling, YarnScaling, yarn_attention_factor
from testing.model.transformers_twin import twin

CONTEXT = 64
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT},
    "yarn of the context in the file": {"type": "yarn", "factor": 2.5},
    "yarn, all named": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn with two scales": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_are_those_of_transformers(qwen3: ModelConfig, make_decoder: Callable[..., Decoder], name: str) -> None:
    raw = replace(qwen3, max_position_embeddings=CONTEXT).to_hugging_face() | {"rope_scaling": SCALINGS[name]}
    config = ModelConfig.from_hugging_face(raw)
    assert ModelConfig.from_hugging_face(config.to_hugging_face()) == config
    decoder = make_decoder(config)
    length = config.max_position_embeddings if name != "yarn with two scales" else 300
    tokens, positions = torch.arange(length) * 7 % 96, torch.arange(length)
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, length], dtype=torch.int32))
    with torch.no_grad():
        expected = twin(decoder)(tokens[None]).logits[0]
        torch.testing.assert_close(decoder.logits(decoder(tokens, positions, attend)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("stated", "fields", "longest"),
    [
        pytest.param(64, {"factor": 4.0, "original_max_position_embeddings": 64}, 256, id="added by hand"),
        pytest.param(256, {"factor": 4.0, "original_max_position_embeddings": 64}, 256, id="stated"),
        pytest.param(300, {"factor": 4.0, "original_max_position_embeddings": 64}, 300, id="more is stated"),
        pytest.param(64, {"factor": 4.0}, 256, id="of the stated context"),
    ],
)
def test_yarn_lengthens_the_context(qwen3: ModelConfig, stated: int, fields: dict[str, Any], longest: int) -> None:
    raw = qwen3.to_hugging_face() | {"max_position_embeddings": stated, "rope_scaling": {"rope_type": "yarn"} | fields}
    config = ModelConfig.from_hugging_face(raw)
    assert config.max_position_embeddings == longest
    assert config.rope_scaling == YarnScaling(
        factor=4.0, original_max_position_embeddings=64, attention_factor=yarn_attention_factor(4.0)
    )


def test_linear_scaling_keeps_the_stated_context(qwen3: ModelConfig) -> None:
    raw = qwen3.to_hugging_face() | {"rope_scaling": {"type": "linear", "factor": 2}}
    config = ModelConfig.from_hugging_face(raw)
    assert config.rope_scaling == LinearScaling(factor=2.0)
    assert config.max_position_embeddings == qwen3.max_position_embeddings
