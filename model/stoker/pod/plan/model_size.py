"""Sizes of a decoder: its parameters by part, and the work of one token. T tokens, D hidden, V vocab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_QK_NORM = ("qwen3", "qwen3-moe")
_QKV_BIAS = ("qwen2",)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The dimensions of a decoder that decide memory and time."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Of q, k, v and o."""
    qkv_bias: bool = False
    """Of q, k and v alone."""
    sliding_window: int = 0
    """Tokens that a token attends to; 0: all before it."""
    qk_norm: bool = False
    num_experts: int = 0
    """0: a dense feed-forward layer."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of one expert."""
    dense_at: tuple[int, ...] = ()
    """Numbers of the layers of a model with experts that have none."""
    max_positions: int = 0
    """Tokens of the longest sequence; 0: not known."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read the `model` section of the trainer's configuration, or the fields of a `ModelConfig`.

        Raises:
            ValueError: a dimension is missing.
        """
        missing = [name for name in _NEEDED if not fields.get(name)]
        if missing:
            raise ValueError(f"model: {', '.join(missing)} is missing")
        heads, hidden = int(fields["num_heads"]), int(fields["hidden_size"])
        experts, architecture = int(fields.get("num_experts") or 0), fields.get("architecture")
        return cls(
            **{name: int(fields[name]) for name in _NEEDED},
            num_kv_heads=int(fields.get("num_kv_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            tie_embeddings=bool(fields.get("tie_embeddings")),
            attention_bias=bool(fields.get("attention_bias")),
            qkv_bias=bool(fields.get("attention_bias")) or architecture in _QKV_BIAS,
            sliding_window=int(fields.get("sliding_window") or 0),
            qk_norm=architecture in _QK_NORM,
            num_experts=experts,
            experts_per_token=int(fields.get("num_experts_per_token") or 0) if experts else 0,
            dense_at=_dense_at(fields) if experts else (),
            expert_size=int(fields.get("moe_intermediate_size") or fields["intermediate_size"]) if experts else 0,
            max_positions=int(fields.get("max_position_embeddings") or 0),
        )

    @property
    def expert_share(self) -> float:
        """The part of the layers that has experts; sizes of a layer are means over all layers."""
        return 1 - len(self.dense_at) / self.num_layers if self.num_experts else 0.0

    @property
    def is_mixed(self) -> bool:
        """Whether some layers are dense and others have experts."""
        return bool(self.num_experts and self.dense_at)

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def attention(self) -> int:
        """Elements of a layer's q, k, v and o projections."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * heads + 2 * kv_heads)

    @property
    def small(self) -> float:
        """Elements of a layer that every tensor-parallel rank holds: norms, biases, the router."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        of_qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        biases = of_qkv + (self.hidden_size if self.attention_bias else 0)
        return norms + biases + self.expert_share * self.hidden_size * self.num_experts

    @property
    def feed_forward(self) -> float:
        """Elements of a layer's dense feed-forward part; 0 with experts."""
        return (1 - self.expert_share) * 3 * self.hidden_size * self.intermediate_size

    @property
    def experts(self) -> float:
        """Elements of all experts of a layer."""
        return self.expert_share * self.num_experts * 3 * self.hidden_size * self.expert_size

    @property
    def parameters(self) -> int:
        """Elements of the whole model, tied ones once."""
        layer = self.attention + self.small + self.feed_forward + self.experts
        return round(self.num_layers * layer) + self.table * (1 if self.tie_embeddings else 2) + self.hidden_size

    @property
    def active_layer(self) -> float:
        """Elements of a layer that are multiplied for one token."""
        return self.attention + self.feed_forward + self.active_experts

    @property
    def active_experts(self) -> float:
        """Those of them that belong to experts and routers."""
        active = self.experts_per_token * 3 * self.hidden_size * self.expert_size + self.hidden_size * self.num_experts
        return self.expert_share * active

    def attention_work(self, sequence_length: int) -> float:
        """Floating-point operations of causal attention for one token of one layer, on average, forward."""
        heads, window = self.num_heads * self.head_dim, self.sliding_window
        if not window or window >= sequence_length:
            return 2.0 * sequence_length * heads
        return 4.0 * heads * window * (1 - window / (2 * sequence_length))


def _dense_at(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those between the sparse ones, and those that are named."""
    every, named = int(fields.get("decoder_sparse_step") or 1), set(fields.get("mlp_only_layers") or ())
    layers = range(int(fields["num_layers"]))
    return tuple(layer for layer in layers if (layer + 1) % every != 0 or layer in named)


_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
