"""Llama 3's stretching of the rotary frequencies, as numbers. No torch here; `rotary` computes with it."""

from __future__ import annotations

from dataclasses import dataclass


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
