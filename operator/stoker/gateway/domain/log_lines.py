"""Lines of the pods of a job: their times, one order for all, and the metrics that they tell. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stoker.pod.log_position import timed
from stoker.pod.metric_log import Sample

_FLOAT = r"[-+]?(?:[\d.,]+(?:e[-+]?\d+)?|nan|inf)"
STEP = re.compile(
    rf"step (?P<step>\d+)/\d+  loss (?P<loss>{_FLOAT})  lr (?P<learning_rate>{_FLOAT})"
    rf"  norm (?P<gradient_norm>{_FLOAT})  (?P<tokens_per_second>{_FLOAT}) tokens/s"
)
VALIDATION = re.compile(rf"step (?P<step>\d+)  validation loss (?P<validation_loss>{_FLOAT})")
JSON_FIELDS = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_second",
}


@dataclass(frozen=True)
class LogLine:
    """One line of a pod. `time` is empty where the cluster notes none."""

    time: str
    pod: str
    text: str
    instant_ns: int = 0
    """The time in nanoseconds from 1970."""


def log_line(pod: str, line: str) -> LogLine:
    """Split a line into its time and its text."""
    found = timed(line)
    return LogLine(found.time, pod, found.text, found.instant_ns)


def place_in_time(line: LogLine, before: int) -> int:
    """Where a line belongs among those of other pods: at its time, and not before the line ahead of it in its pod.

    Args:
        before: the place of the line ahead; 0 for the first.
    """
    return max(before, line.instant_ns)


def metric_samples(lines: Iterable[str]) -> list[Sample]:
    """The metrics in the lines of a trainer, by step. A step that was repeated after a restart has its last values."""
    found: dict[int, dict[str, float | None]] = {}
    for line in lines:
        values = _values(line)
        if values:
            step = int(values.pop("step"))
            found.setdefault(step, {}).update(values)
    return [Sample(step, {k: v for k, v in found[step].items() if v is not None}) for step in sorted(found)]


def _values(line: str) -> dict[str, Any] | None:
    match = STEP.search(line) or VALIDATION.search(line)
    if match is not None:
        return {name: int(text) if name == "step" else _number(text) for name, text in match.groupdict().items()}
    return _json_values(line) if line.startswith('{"kind": ') else None


def _json_values(line: str) -> dict[str, Any] | None:
    """The metrics of a line that `logging.jsonl` writes, where that is the pod's output."""
    try:
        found = json.loads(line)
        step = int(found["step"])
    except (ValueError, KeyError, TypeError):
        return None
    if found.get("kind") == "validation":
        return {"step": step, "validation_loss": _number(found.get("loss"))}
    return {"step": step, **{ours: _number(found.get(theirs)) for theirs, ours in JSON_FIELDS.items()}}


def _number(text: Any) -> float | None:
    """A finite number, else None: JSON has no NaN."""
    try:
        value = float(str(text).replace(",", ""))
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
