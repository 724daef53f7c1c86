"""Sizes of real models for tests of the plan."""

from __future__ import annotations

from stoker.pod.plan.model_size import ModelSize

LLAMA_8B = ModelSize(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
"""Llama-3.1-8B."""
LLAMA_1B = ModelSize(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tie_embeddings=True,
)
"""Llama-3.2-1B."""
