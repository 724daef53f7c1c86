"""Arguments of sampling: tensors on the logits' device.

A step's kernels can be captured in a graph, and no value waits for the host.

B rows to sample, S seats, V vocabulary, L longest sequence, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Columns of `SamplingTable.numbers`."""


@dataclass(frozen=True)
class SamplingTable:
    """Every seat's values. Rows may change between steps, the tensors themselves stay."""

    numbers: Tensor
    """float32 [S, 7], columns as in NUMBERS. Temperature 0 is greedy, top_k 0 or less has no limit."""
    keys: Tensor
    """int64 [S, 2]: seed and choice."""


@dataclass(frozen=True)
class SampleRows:
    """The seats and positions of the logits' rows."""

    seats: Tensor
    """int [B]; -1 is padding: its token is 0 and goes nowhere."""
    positions: Tensor
    """int [B]: where the new token will stand; as many tokens of the seat come before it."""
    filtered: bool = True
    """Some row may have top_k, top_p or min_p. False leaves their kernels out (they are not read then)."""


@dataclass(frozen=True)
class Adjustments:
    """Changes of logits before anything else, for steps in which some row has any: additions, then penalties."""

    history: Tensor
    """int [S, L]: every seat's tokens, prompt and output."""
    num_prompt: Tensor
    """int [S]: prompt tokens of each seat."""
    entry_start: Tensor
    """int32 [B + 1]: which entries belong to each row."""
    entry_tokens: Tensor
    """int32 [E]"""
    entry_biases: Tensor
    """float32 [E]: added to that token's logit; -inf bans it. At most one finite bias per row and token."""
    penalised: bool = True
    """Some row has a penalty; False leaves the counting out."""


class SampledTokens(NamedTuple):
    tokens: Tensor
    """int64 [B]"""
    valid: Tensor
    """bool [B]: the row's largest logit was finite; a nan counts as larger than any number."""
