"""The configuration of a model: its architecture and dimensions, in Hugging Face's names. No torch here.

`from_hugging_face` reads a `config.json` as foreign input: a feature that this build cannot compute is refused by name,
never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Architecture = Literal["llama", "qwen3"]
ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
CLASS_NAMES: dict[Architecture, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""Defaults of transformers for fields that a `config.json` leaves out."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies."""

    factor: float
    """Factor by which the context became longer."""
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Context length in tokens before stretching."""

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling: factor must be >= 1 and original_max_position_embeddings >= 1, not {self.factor} and "
                f"{self.original_max_position_embeddings}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: needs 0 < low_freq_factor < high_freq_factor, not {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions of a decoder."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
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
    """Biases on the q, k, v and o projections."""
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
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be >= 1, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated in pairs, not {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """q and k are normalised per head before rotation."""
        return self.architecture == "qwen3"

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied ones once."""
        qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = self.hidden_size * (qkv_rows + self.num_heads * self.head_dim)
        biases = qkv_rows + self.hidden_size if self.attention_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        block = attention + biases + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * block + self.hidden_size

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`. Raises ValueError that names the field this build cannot compute."""
        refuse_unsupported(raw)
        raw = {**FAMILY_DEFAULTS[raw["model_type"]], **raw}
        hidden_size, num_heads = whole_number(raw, "hidden_size"), whole_number(raw, "num_attention_heads")
        theta, scaling = read_rope(raw)
        eos = raw.get("eos_token_id")
        return cls(
            architecture=raw["model_type"],
            vocab_size=whole_number(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=whole_number(raw, "intermediate_size"),
            num_layers=whole_number(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=whole_number({"num_key_value_heads": num_heads} | given(raw), "num_key_value_heads"),
            head_dim=whole_number({"head_dim": hidden_size // max(num_heads, 1)} | given(raw), "head_dim"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            max_position_embeddings=whole_number(raw, "max_position_embeddings"),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
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
            scaling = {"rope_type": "llama3", "rope_theta": self.rope_theta} | vars(self.rope_scaling)
        extra: dict[str, Any] = {"use_sliding_window": False} if self.architecture == "qwen3" else {"mlp_bias": False}
        return {
            "architectures": [CLASS_NAMES[self.architecture]],
            "model_type": self.architecture,
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
        } | extra


def needed(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json: {name} is missing")
    return raw[name]


def given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Null means as much as nothing."""
    return {name: value for name, value in raw.items() if value is not None}


def whole_number(raw: Mapping[str, Any], name: str) -> int:
    value = needed(raw, name)
    if not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"config.json: {name} must be a whole number, not {value!r}")
    return int(value)


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse every feature of the two families that changes the computation and is not built."""
    if (kind := raw.get("model_type")) not in ARCHITECTURES:
        raise ValueError(f"config.json: not supported yet: model_type {kind!r}; allowed: {', '.join(ARCHITECTURES)}")
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "sliding_window": kind == "llama" and raw.get("sliding_window") and raw.get("use_sliding_window") is None,
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1) not in (None, 1),
        "quantization_config": raw.get("quantization_config") is not None,
        "compression_config": raw.get("compression_config") is not None,
        "pretraining_tp": raw.get("pretraining_tp", 1) not in (None, 1),
        "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"config.json: not supported yet: {name} = {raw[name]!r}")


def read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: {name} must be an object, not {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"config.json: not supported yet: {name} per layer type: {', '.join(rope)}")
    if (share := rope.get("partial_rotary_factor", 1)) not in (None, 1):
        raise ValueError(f"config.json: not supported yet: partial_rotary_factor = {share!r}")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: not supported yet: rope_scaling {kind!r}; allowed: default, llama3")
    return theta, RopeScaling(
        factor=float(needed(rope, "factor")),
        low_freq_factor=float(needed(rope, "low_freq_factor")),
        high_freq_factor=float(needed(rope, "high_freq_factor")),
        original_max_position_embeddings=int(needed(rope, "original_max_position_embeddings")),
    )
