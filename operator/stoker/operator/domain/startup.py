"""Where the time of a start went: from the opening of an attempt to the end of its first step, in parts that add up.

Moments come from three clocks (the operator's, the nodes', the pods'), so a moment never counts as earlier than the one
before it, and one that is not known gives its part to the next. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

PARTS = ("queue", "schedule", "pull", "start", "rendezvous", "load", "compile", "first_step")
"""The parts in their order. Each ends at a moment; `compile` is the part of the first step in which kernels were
compiled."""
_ENDS = ("queue", "schedule", "pull", "start", "rendezvous", "load", "first_step")


def broken_down(opened: datetime, ends: Mapping[str, datetime | None], compile_s: float = 0.0) -> dict[str, int]:
    """Return the whole seconds of each part; a part whose end is not known is left out.

    Args:
        opened: when the attempt was opened.
        ends: the moment at which each part ended, by the parts' names without `compile`.
        compile_s: time that was spent compiling kernels.
    """
    passed, seconds = 0, dict[str, int]()
    for part in _ENDS:
        end = ends.get(part)
        if end is not None:
            until = max(passed, int((end - opened).total_seconds()))
            passed, seconds[part] = until, until - passed
    return _with_compile(seconds, compile_s)


def _with_compile(seconds: Mapping[str, int], compile_s: float) -> dict[str, int]:
    if "first_step" not in seconds:
        return dict(seconds)
    compiled = min(round(compile_s), seconds["first_step"])
    split = {**seconds, "compile": compiled, "first_step": seconds["first_step"] - compiled}
    return {part: split[part] for part in PARTS if part in split}
