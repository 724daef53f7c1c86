"""Where the time of a start went, in parts that add up: of a training attempt, and of a replica of engines.

Moments come from three clocks (the operator's, the nodes', the pods'), so a moment never counts as earlier than the one
before it, and one that is not known gives its part to the next. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

PARTS = ("queue", "schedule", "pull", "start", "rendezvous", "load", "compile", "first_step")
"""The parts in their order. Each ends at a moment; `compile` is the part of the first step in which kernels were
compiled."""
_ENDS = ("queue", "schedule", "pull", "start", "rendezvous", "load", "first_step")

ENGINE_PARTS = {
    "Importing": "start",
    "Planning": "plan",
    "FetchingModel": "fetch",
    "StartingRanks": "ranks",
    "LoadingWeights": "load",
    "AllocatingCache": "cache",
    "CompilingKernels": "kernels",
    "CapturingGraphs": "graphs",
    "Warming": "warm",
}
"""The parts that an engine reports in `startup_s`, and their names in a status."""


def broken_down(opened: datetime, ends: Mapping[str, datetime | None], compile_s: float = 0.0) -> dict[str, int]:
    """Return the whole seconds of each part; a part whose end is not known is left out.

    Args:
        opened: when the attempt was opened.
        ends: the moment at which each part ended, by the parts' names without `compile`.
        compile_s: time that was spent compiling kernels.
    """
    return _with_compile(_between(opened, {part: ends.get(part) for part in _ENDS}), compile_s)


def engine_start(
    created: datetime,
    scheduled: datetime | None,
    started: datetime,
    reported_s: Mapping[str, float],
    ready: datetime,
) -> dict[str, int]:
    """Return the whole seconds of each part from the creation of a replica's pods until all of them were ready.

    Args:
        scheduled: when the last pod had its node.
        started: when the last container ran.
        reported_s: seconds of the parts that the engine measured since then, in their order. Parts with a name that is
            not in `ENGINE_PARTS` are in the next one.
    """
    ends: dict[str, datetime | None] = {"schedule": scheduled, "pull": started}
    moment = started
    for name, took_s in reported_s.items():
        moment += timedelta(seconds=max(took_s, 0.0))
        if name in ENGINE_PARTS:
            ends[ENGINE_PARTS[name]] = moment
    return _between(created, {**ends, "ready": ready})


def _between(opened: datetime, ends: Mapping[str, datetime | None]) -> dict[str, int]:
    """The seconds between one known end and the next, in the order of `ends`."""
    passed, seconds = 0, dict[str, int]()
    for part, end in ends.items():
        if end is not None:
            until = max(passed, int((end - opened).total_seconds()))
            passed, seconds[part] = until, until - passed
    return seconds


def _with_compile(seconds: Mapping[str, int], compile_s: float) -> dict[str, int]:
    if "first_step" not in seconds:
        return dict(seconds)
    compiled = min(round(compile_s), seconds["first_step"])
    split = {**seconds, "compile": compiled, "first_step": seconds["first_step"] - compiled}
    return {part: split[part] for part in PARTS if part in split}
