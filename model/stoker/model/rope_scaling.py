"""How rotary frequencies are stretched for longer contexts, as numbers. No torch here; `rotary` computes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency is divided by `factor`: positions are interpolated."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        check_factor(self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): slow pairs are interpolated, fast ones kept, and cosine and sine grow."""

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    """Context length in tokens before stretching."""
    attention_factor: float
    """Of cosine and sine, so that scores have its square."""
    beta_fast: float = 32.0
    """Turns in the original context from which a pair is kept."""
    beta_slow: float = 1.0
    """Turns in the original context up to which a pair is interpolated."""
    truncate: bool = True
    """The pairs between which frequencies are blended are whole numbers."""

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_original(self.original_max_position_embeddings)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling: needs 0 < beta_slow < beta_fast, not {self.beta_slow} and {self.beta_fast}"
            )
        if self.attention_factor <= 0:
            raise ValueError(f"rope_scaling: attention_factor must be above 0, not {self.attention_factor}")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of the rotary frequencies."""

    kind: ClassVar[str] = "llama3"
    factor: float
    """Factor by which the context became longer."""
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Context length in tokens before stretching."""

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_original(self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: needs 0 < low_freq_factor < high_freq_factor, not {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return the growth of cosine and sine that goes with a stretching. Scales of 0 count as not given."""
    growth = 0.1 * math.log(max(factor, 1.0))
    if not mscale or not mscale_all_dim:
        return 1 + growth
    return (1 + mscale * growth) / (1 + mscale_all_dim * growth)


def check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"rope_scaling: factor must be >= 1, not {factor}")


def check_original(length: int) -> None:
    if length < 1:
        raise ValueError(f"rope_scaling: original_max_position_embeddings must be >= 1, not {length}")
