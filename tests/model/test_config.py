from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from stoker.model.config import ModelConfig
from stoker.model.rope_scaling import Llama3Scaling
from stoker.model.weights.config_file import read_config

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_a_config_survives_the_way_through_hugging_face(config: ModelConfig) -> None:
    assert ModelConfig.from_hugging_face(config.to_hugging_face()) == config


def test_transformers_reads_our_config_as_its_own(config: ModelConfig) -> None:
    theirs = AutoConfig.for_model(**config.to_hugging_face())
    assert ModelConfig.from_hugging_face(theirs.to_dict()) == config


def test_missing_fields_take_the_defaults_of_the_family() -> None:
    config = ModelConfig.from_hugging_face(RAW)
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings, config.rope_theta) == (12, 4, False, 10000.0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_missing_fields_mean_what_transformers_takes_them_for(family: str) -> None:
    raw = RAW | {
        "model_type": family,
        "num_attention_heads": 32,
        "hidden_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    theirs = AutoConfig.for_model(**raw).to_dict()
    assert ModelConfig.from_hugging_face(raw) == ModelConfig.from_hugging_face(theirs)


def test_qwen3_s_unused_window_is_no_window() -> None:
    raw = RAW | {"model_type": "qwen3", "head_dim": 12, "num_key_value_heads": 2, "sliding_window": 4096}
    assert ModelConfig.from_hugging_face(raw | {"use_sliding_window": False}).num_kv_heads == 2


def test_rope_is_read_in_both_spellings() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    old = ModelConfig.from_hugging_face(RAW | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = ModelConfig.from_hugging_face(RAW | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "not supported yet: model_type 'gpt2'"),
        ({"model_type": None}, "not supported yet: model_type None"),
        ({"hidden_act": "gelu"}, "not supported yet: hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "not supported yet: mlp_bias"),
        ({"use_sliding_window": True}, "not supported yet: use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "not supported yet: layer_types"),
        ({"sliding_window": 4096}, "not supported yet: sliding_window = 4096"),
        ({"partial_rotary_factor": 0.5}, "not supported yet: partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "not supported yet: rope_parameters per layer"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"rope_scaling": {"rope_type": None, "factor": 2}}, "not supported yet: rope_scaling None"),
        ({"compression_config": {"format": "int-quantized"}}, "not supported yet: compression_config"),
        ({"hidden_size": "big"}, "config.json: hidden_size must be a whole number, not 'big'"),
        ({"num_hidden_layers": [2]}, r"config.json: num_hidden_layers must be a whole number, not \[2\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not supported yet: quantization_config"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "rope_scaling 'dynamic'; allowed: default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": [2]}}, r"factor must be a number, not \[2\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "x"}}, "mscale must be a number, not 'x'"),
        ({"rope_theta": "long"}, "rope_theta must be a number, not 'long'"),
        ({"rope_theta": math.nan}, "config.json: rope_theta must be a number, not nan"),
        ({"rope_theta": 10**400}, r"config.json: rope_theta must be a number, not 10+\.\.\.0+$"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0, not 0.0"),
        ({"rope_parameters": {"rope_theta": -1e4}}, "rope_theta must be a finite number above 0, not -10000.0"),
        ({"rms_norm_eps": math.nan}, "config.json: rms_norm_eps must be a number, not nan"),
        ({"rms_norm_eps": "NaN"}, "config.json: rms_norm_eps must be a number, not 'NaN'"),
        ({"rms_norm_eps": 0.0}, "norm_eps must be a finite number above 0, not 0.0"),
        ({"initializer_range": math.inf}, "config.json: initializer_range must be a number, not inf"),
        ({"max_position_embeddings": math.inf}, "max_position_embeddings must be a whole number, not inf"),
        ({"max_position_embeddings": math.nan}, "max_position_embeddings must be a whole number, not nan"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": math.nan}},
            "attention_factor must be a number, not nan",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": math.inf}},
            "beta_fast must be a number, not inf",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be >= 1, not 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor must be >= 1, not 0.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_slow": 32}}, "0 < beta_slow < beta_fast, not 32.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, not 0"),
        ({"eos_token_id": "x"}, "config.json: eos_token_id must be a token id or a list of them, not 'x'"),
        ({"eos_token_id": [2, {}]}, r"config.json: eos_token_id must be a token id or a list of them, not \[2, {}\]"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers must be at most 4096, not 1000000000"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hugging_face(RAW | change)


def test_end_tokens_of_the_generation_config_are_checked() -> None:
    files = {"generation_config.json": b'{"eos_token_id": [1, null, 7]}'}
    assert read_config(RAW, files).eos_token_ids == (1, 7)
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be a token id or .* not True"):
        read_config(RAW, {"generation_config.json": b'{"eos_token_id": true}'})


def test_a_null_means_a_missing_number() -> None:
    nulls = dict.fromkeys(["rope_theta", "rms_norm_eps", "initializer_range"])
    assert ModelConfig.from_hugging_face(RAW | nulls) == ModelConfig.from_hugging_face(RAW)


def test_the_loss_of_routers_has_a_finite_weight() -> None:
    raw = RAW | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        with pytest.raises(ValueError, match=f"config.json: {name} must be a number, not nan"):
            ModelConfig.from_hugging_face(raw | {name: math.nan})


def test_end_tokens_may_be_one_or_several(llama: ModelConfig) -> None:
    assert ModelConfig.from_hugging_face(RAW | {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert ModelConfig.from_hugging_face(RAW | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert replace(llama, eos_token_ids=(2,)).to_hugging_face()["eos_token_id"] == 2
