"""The rotary table: cosine and sine of every position, made once in float32.

Rows are looked up, never recomputed, so that a position has the same bits in every batch. T tokens, H head_dim.

A table is made by `decoder`; blocks and attention only read it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


class RotaryTable:
    """`cos` and `sin` of every position side by side, [max_position, 2, H], `sin` with the sign of the half that it
    multiplies.

    Made at first use on a device, then kept.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.head_dim = config.head_dim
        self.max_position = config.max_position_embeddings
        self.frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        scaling = config.rope_scaling
        self.growth = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        """Factor of cosine and sine."""
        self.tables: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The whole table on `device`. The first call there allocates: make it before capturing a graph."""
        if device not in self.tables:
            with torch.inference_mode(False):  # the same table serves passes with and without gradients
                self.tables[device] = self.build(device)
        return self.tables[device]

    def build(self, device: torch.device) -> Tensor:
        angles = torch.arange(self.max_position, dtype=torch.float32)[:, None] * self.frequencies[None, :]
        made = self.growth * angles.cos(), self.growth * angles.sin()  # of the CPU everywhere: the same bits
        cos, sin = (part.to(device) for part in made)
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)

    def rows(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos_T1H and sin_T1H in float32, views of one gather.

        A position beyond the table raises IndexError on the CPU.
        """
        cos_T1H, sin_T1H = self.on(positions_T.device).index_select(0, positions_T).chunk(2, 1)
        return cos_T1H, sin_T1H


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each of the H/2 pairs, float32, on the CPU."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim))
    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case YarnScaling():
            return blend(frequencies, theta, scaling)
        case Llama3Scaling():
            return stretch(frequencies, scaling)


def blend(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Stretch as YaRN does: divide slow pairs by `factor`, keep fast ones, blend those between by their number."""
    pairs = len(frequencies)
    first, last = (
        pairs * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / math.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001  # a step where both are one pair
    slow = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch as Llama 3 does: divide slow pairs by `factor`, keep fast ones, blend those between by wavelength."""
    wavelength = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    long, short = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    share = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    slow = torch.where(wavelength > long, frequencies / scaling.factor, blended)
    return torch.where(wavelength < short, frequencies, slow)
