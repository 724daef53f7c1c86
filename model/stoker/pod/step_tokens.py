"""How many tokens of prompts an engine's step takes beside sequences that decode. Pure.

The scheduler decides by it, and the operator predicts by it what a step's tokens cost.
"""

from __future__ import annotations

import math

BACKLOG_STEPS = 6
"""Steps in which prompts that wait are to be computed."""


def prompt_tokens(mixed: float, backlog: float, most: float = math.inf) -> float:
    """Prompt tokens of a step: `mixed` while few wait, a part of the backlog where many do, never above `most`."""
    return min(max(mixed, math.ceil(backlog / BACKLOG_STEPS)), most)


def prompt_steps(mixed: float, tokens: float, most: float) -> int:
    """Steps that a prompt of so many tokens takes when no other waits."""
    if mixed >= most:
        return math.ceil(tokens / most)
    full = max(math.ceil(tokens / most) - BACKLOG_STEPS, 0)
    steps, left = full, tokens - full * most
    while left > 0:
        steps, left = steps + 1, left - prompt_tokens(mixed, left, most)
    return steps
