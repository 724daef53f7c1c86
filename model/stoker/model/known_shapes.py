"""Shapes of published models, by name: what kernels can be compiled for without their files. No torch.

Figures from each model's `config.json`.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.model.config import ModelConfig
from stoker.model.rope_scaling import Llama3Scaling

QWEN3_06B = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_position_embeddings=40960,
)
QWEN3_8B = replace(
    QWEN3_06B, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False
)
LLAMA31_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    norm_eps=1e-5,
    max_position_embeddings=131072,
)
LLAMA32_1B = replace(
    LLAMA31_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    tie_embeddings=True,
)
LLAMA31_70B = replace(LLAMA31_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
QWEN3_30B_A3B = ModelConfig(
    architecture="qwen3-moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_position_embeddings=40960,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)

SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": LLAMA32_1B,
    "llama-3.1-8b": LLAMA31_8B,
    "llama-3.1-70b": LLAMA31_70B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
