"""The families of models: how each one differs from the others, and its names in Hugging Face files. No torch here.

A new family is a new row of `FAMILIES`, if its blocks compute what others compute already.

Pure; read by `config` and by the blocks through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
ARCHITECTURES: tuple[str, ...] = get_args(Architecture)


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the feed-forward part with experts, below `model.layers.<layer>`."""

    part: str
    """Name of the whole part; the router is `<part>.gate`, an expert `<part>.experts.<number>`."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family."""

    model_type: str
    """Name in a `config.json`."""
    class_name: str
    """Class in transformers."""
    window: Literal["never", "always", "switched", "switched by layer"] = "never"
    """Meaning of `sliding_window` in a `config.json`: it has none; it applies where it is given; only with
    `use_sliding_window`; the same, in the layers from `max_window_layers` on."""
    qk_norm: bool = False
    """q and k are normalised per head before rotation."""
    biases: Literal["none", "attention_bias", "qkv"] = "none"
    """The attention has no biases; all four by `attention_bias`; always those of q, k and v."""
    experts: ExpertNames | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for fields that a `config.json` leaves out."""


MLP_EXPERTS = ExpertNames(part="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_EXPERTS = ExpertNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")
QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        biases="attention_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        window="always",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        window="switched by layer",
        biases="qkv",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, **QWEN_WINDOW},
    ),
    "qwen3": Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        window="switched by layer",
        qk_norm=True,
        biases="attention_bias",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, **QWEN_WINDOW},
    ),
    "mixtral": Family(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        window="always",
        experts=MIXTRAL_EXPERTS,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "default_theta": 1e6,
            "default_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-moe": Family(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        window="switched",
        qk_norm=True,
        biases="attention_bias",
        experts=MLP_EXPERTS,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "default_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
}
"""Architecture -> family. transformers reads an expert's weights one by one, whatever it fuses in memory."""

BY_MODEL_TYPE: Mapping[str, str] = {family.model_type: name for name, family in FAMILIES.items()}
"""`model_type` of a `config.json` -> architecture."""
