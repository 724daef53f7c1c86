"""The curves of a metrics log: loss, validation loss, learning rate and gradient norm by step.

Reads the JSON lines that the trainer writes (`logging.jsonl`). Pure but for the reading of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CURVES = (
    ("step", "loss", "loss"),
    ("validation", "loss", "validation loss"),
    ("step", "learning_rate", "learning rate"),
    ("step", "grad_norm", "gradient norm"),
)
"""(kind of line, field, title), in the order in which they are drawn."""


ABSENT = object()
_LOGS = "(logging.jsonl, or log.jsonl of a run)"


@dataclass(frozen=True)
class Curve:
    """One series, in the order of its steps."""

    title: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def read_curves(file: Path) -> list[Curve]:
    """Read the curves that have a finite point. A step that was trained again counts with its last line.

    Raises:
        ValueError: a line is not of a metrics log, or none is; the message names file and line.
        OSError: the file cannot be read.
    """
    found: dict[str, dict[int, float]] = {title: {} for _, _, title in CURVES}
    for where, line in _lines(file):
        for kind, field, title in CURVES:
            if line.get("kind") == kind:
                step = _step(line, where)
                if line.get(field, ABSENT) is not None:  # a step with fp16 may have no norm
                    found[title][step] = _number(line, field, where)
    curves = [curve for title, points in found.items() if (curve := Curve(title, *_sorted(points))).steps]
    if not curves:
        raise ValueError(f"{file}: the file has no step; a metrics log is needed {_LOGS}")
    return curves


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and fields of each whole line; a last one without a line end is still being written."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ValueError(f"{file}: not a text file; a metrics log is needed {_LOGS}") from error
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        where = f"{file}:{number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not a JSON line ({error})") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: an object is needed, got {type(fields).__name__}")
        yield where, fields


def _step(line: dict[str, Any], where: str) -> int:
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"{where}: step must be a whole number, got {step!r}")
    return step


def _number(line: dict[str, Any], field: str, where: str) -> float:
    value = line.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where}: {field} must be a number, got {value!r}")
    return float(value)


def _sorted(points: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Steps and values by step, without values that are not finite."""
    chosen = [(step, value) for step, value in sorted(points.items()) if math.isfinite(value)]
    return tuple(step for step, _ in chosen), tuple(value for _, value in chosen)
