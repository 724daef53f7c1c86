"""Shapes of models that several benches measure, with random weights."""

from __future__ import annotations

from stoker.model.known_shapes import LLAMA31_8B, LLAMA31_70B, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B

__all__ = ["LLAMA31_8B", "LLAMA31_70B", "QWEN3_06B", "QWEN3_8B", "QWEN3_30B_A3B"]
