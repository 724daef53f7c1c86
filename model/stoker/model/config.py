"""The configuration of a model: its architecture and dimensions, in Hugging Face's names. No torch here.

`from_hugging_face` reads a `config.json` as foreign input: a feature that this build cannot compute is refused by name,
never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from stoker.model.config_json import (
    MOST_EXPERTS,
    MOST_LAYERS,
    given,
    number,
    read_experts,
    read_window,
    refuse_unsupported,
    token_ids,
    whole_number,
)
from stoker.model.family import ARCHITECTURES, BY_MODEL_TYPE, FAMILIES, Architecture, Family
from stoker.model.rope_json import read_rope
from stoker.model.rope_scaling import RopeScaling

__all__ = ["ARCHITECTURES", "Architecture", "ModelConfig", "RopeScaling"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions of a decoder."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward part, and of one expert unless `moe_intermediate_size` is given."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of one head; need not be hidden_size / num_heads."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The output layer uses the embedding's weight."""
    attention_bias: bool = False
    """Biases on the q, k, v and o projections; qwen2 always has those of q, k and v, and no others."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""
    max_window_layers: int = 0
    """The first so many layers attend to all tokens, whatever the window."""
    num_experts: int | None = None
    """Experts of a layer; for mixtral and qwen3-moe."""
    num_experts_per_token: int | None = None
    moe_intermediate_size: int | None = None
    """Width of one expert; None: `intermediate_size`."""
    norm_topk_prob: bool = True
    """The weights of a token's experts add up to one."""
    decoder_sparse_step: int = 1
    """Every so many layers have experts (the last of each run); the others are dense."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of further dense layers."""
    router_aux_loss_coef: float = 0.001
    """Weight of the load-balance loss in training."""
    router_z_loss_coef: float = 0.0
    """Weight of the z loss in training: the mean square of the logarithm of the router's normaliser."""
    max_position_embeddings: int = 2048
    """Longest sequence in tokens."""
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture: not supported yet: {self.architecture!r}; allowed: {', '.join(ARCHITECTURES)}"
            )
        sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"]
        for name in (*sizes, "head_dim", "max_position_embeddings", "decoder_sparse_step", "sliding_window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, not {value}")
        for name, most in (("num_layers", MOST_LAYERS), ("num_experts", MOST_EXPERTS)):
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, not {value}")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated in pairs, not {self.head_dim}")
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))  # a list where it comes from JSON
        self.check_attention()
        self.check_experts()

    def check_attention(self) -> None:
        family, windowed = self.family, [name for name, family in FAMILIES.items() if family.window != "never"]
        if self.attention_bias and family.biases != "attention_bias":
            has = "always has biases on q, k and v alone" if family.biases == "qkv" else "has none"
            raise ValueError(f"attention_bias: leave it out, because {self.architecture} {has}")
        if self.sliding_window is not None and family.window == "never":
            raise ValueError(
                f"sliding_window: {self.architecture} has none, got {self.sliding_window}; allowed with "
                f"{', '.join(windowed)}"
            )
        if self.max_window_layers and (family.window != "switched by layer" or self.sliding_window is None):
            raise ValueError("max_window_layers: allowed with sliding_window and qwen2 or qwen3 only")

    def check_experts(self) -> None:
        if self.family.experts is None:
            given = [name for name in EXPERT_SIZES if getattr(self, name) is not None]
            if given or self.mlp_only_layers or self.decoder_sparse_step != 1:
                name = (*given, "mlp_only_layers or decoder_sparse_step")[0]
                raise ValueError(f"{name}: {self.architecture} has no experts; allowed with mixtral, qwen3-moe")
            return
        if self.num_experts is None or self.num_experts_per_token is None:
            raise ValueError(f"num_experts and num_experts_per_token are needed for {self.architecture}")
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token must lie between 1 and num_experts {self.num_experts}, not "
                f"{self.num_experts_per_token}"
            )
        if self.expert_size < 1 or min(self.router_aux_loss_coef, self.router_z_loss_coef) < 0:
            raise ValueError("moe_intermediate_size must be >= 1, and the router's loss coefficients >= 0")
        if self.architecture == "mixtral":
            plain = {"moe_intermediate_size": None, "norm_topk_prob": True, **EVERY_LAYER}
            for name, value in plain.items():
                if getattr(self, name) != value:
                    raise ValueError(f"{name}: mixtral has {value} there, got {getattr(self, name)}")
        if any(not 0 <= layer < self.num_layers for layer in self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers: {list(self.mlp_only_layers)} are not all within 0..{self.num_layers}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def expert_size(self) -> int:
        """Width of one expert."""
        return self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.family.biases == "qkv"

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of this layer has experts."""
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers
        return self.num_experts is not None and is_sparse

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    def window(self, layer: int) -> int | None:
        """Return the tokens that a token of this layer attends to, itself included; None: all before it."""
        return None if layer < self.max_window_layers else self.sliding_window

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normalised per head before rotation."""
        return self.family.qk_norm

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied ones once."""
        return self.count_parameters(self.num_experts or 0)

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token meets: those of its own experts, and all others."""
        return self.count_parameters(self.num_experts_per_token or 0)

    def count_parameters(self, experts: int) -> int:
        """Count the weights with so many experts in a layer that has experts."""
        hidden = self.hidden_size
        qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = hidden * (qkv_rows + self.num_heads * self.head_dim)
        biases = (qkv_rows if self.qkv_bias else 0) + (hidden if self.attention_bias else 0)
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        sparse = len(self.expert_layers)
        router = hidden * (self.num_experts or 0)
        feed_forward = (self.num_layers - sparse) * self.intermediate_size + sparse * experts * self.expert_size
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        blocks = self.num_layers * (attention + biases + norms) + sparse * router + 3 * hidden * feed_forward
        return embeddings + blocks + hidden

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`. Raises ValueError that names the field this build cannot compute."""
        refuse_unsupported(raw)
        architecture = BY_MODEL_TYPE[raw["model_type"]]
        raw = {**FAMILIES[architecture].defaults, **raw}
        hidden_size, num_heads = whole_number(raw, "hidden_size"), whole_number(raw, "num_attention_heads")
        rope = read_rope(raw)
        return cls(
            architecture=cast("Architecture", architecture),
            vocab_size=whole_number(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=whole_number(raw, "intermediate_size"),
            num_layers=whole_number(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=whole_number({"num_key_value_heads": num_heads} | given(raw), "num_key_value_heads"),
            head_dim=whole_number({"head_dim": hidden_size // max(num_heads, 1)} | given(raw), "head_dim"),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            norm_eps=number({"rms_norm_eps": 1e-6} | given(raw), "rms_norm_eps"),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)) and FAMILIES[architecture].biases != "qkv",
            **read_window(raw, FAMILIES[architecture]),
            **(read_experts(raw, architecture) if FAMILIES[architecture].experts else {}),
            max_position_embeddings=rope.max_position_embeddings,
            initializer_range=number({"initializer_range": 0.02} | given(raw), "initializer_range"),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=token_ids(raw, "eos_token_id", "config.json"),
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_hugging_face(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` that `from_hugging_face` and transformers read."""
        eos: int | list[int] | None = (
            None
            if not self.eos_token_ids
            else self.eos_token_ids[0]
            if len(self.eos_token_ids) == 1
            else list(self.eos_token_ids)
        )
        scaling = None
        if self.rope_scaling is not None:
            kind = self.rope_scaling.kind
            scaling = {"rope_type": kind, "rope_theta": self.rope_theta} | vars(self.rope_scaling)
        return {
            "architectures": [self.family.class_name],
            "model_type": self.family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "use_cache": True,
        } | self.to_family_fields()

    def to_family_fields(self) -> dict[str, Any]:
        """Return the fields of a `config.json` that not every family has."""
        fields: dict[str, Any] = {"mlp_bias": False} if self.architecture == "llama" else {}
        if self.family.window == "always":
            fields["sliding_window"] = self.sliding_window
        elif self.family.window != "never":
            fields |= {"use_sliding_window": self.sliding_window is not None, "sliding_window": self.sliding_window}
        if self.family.window == "switched by layer":
            fields["max_window_layers"] = self.max_window_layers
        if self.family.experts is None:
            return fields
        fields["num_experts_per_tok"] = self.num_experts_per_token
        fields["router_aux_loss_coef"] = self.router_aux_loss_coef
        fields["router_z_loss_coef"] = self.router_z_loss_coef
        if self.architecture == "mixtral":
            return fields | {"num_local_experts": self.num_experts}
        return fields | {
            "num_experts": self.num_experts,
            "moe_intermediate_size": self.expert_size,
            "norm_topk_prob": self.norm_topk_prob,
            "decoder_sparse_step": self.decoder_sparse_step,
            "mlp_only_layers": list(self.mlp_only_layers),
        }


EXPERT_SIZES = ("num_experts", "num_experts_per_token", "moe_intermediate_size")
EVERY_LAYER: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
