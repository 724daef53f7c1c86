"""The numbers of one Adam or AdamW step over a flat buffer.

A value, made by the trainer's optimizer and passed through `Ops` to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The values that all elements of one buffer share in one step."""

    decoupled: bool
    """AdamW: weights decay directly; else the decay is added to the gradient."""
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decay_end: int
    """Elements [0, decay_end) decay."""
    step: int
    """Counts from 1."""
