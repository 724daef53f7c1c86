"""The curves of a metrics log: loss, validation loss, learning rate and gradient norm by step.

Of the lines that the trainer writes (`logging.jsonl`) the same count as in the history of a job (`pod.metric_log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.pod.metric_log import LogReader, Sample

TITLES = {
    "loss": "loss",
    "validation_loss": "validation loss",
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
}
"""Column of a sample -> title, in the order in which they are drawn."""


@dataclass(frozen=True)
class Curve:
    """One series, in the order of its steps."""

    title: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class LogCurves:
    """The curves of a log that have a finite point, and how many of its lines cannot be read."""

    curves: list[Curve]
    unreadable: int


def read_curves(file: Path) -> LogCurves:
    """Read the curves of a file. A step that was trained again counts with its last line.

    Raises:
        ValueError: it has no step.
        OSError: it cannot be read.
    """
    reader = LogReader(file)
    curves = curves_of(list(reader.samples())[::-1])
    if not curves:
        lines = f", and {reader.unreadable} lines are of another form" if reader.unreadable else ""
        needed = "a metrics log is needed (logging.jsonl, or log.jsonl of a run)"
        raise ValueError(f"{file}: the file has no step{lines}; {needed}")
    return LogCurves(curves, reader.unreadable)


def curves_of(points: Sequence[Sample]) -> list[Curve]:
    """Return the curves that have a point. `points`: in the order of their steps."""
    found = []
    for column, title in TITLES.items():
        having = [point for point in points if column in point.values]
        if having:
            values = tuple(point.values[column] for point in having)
            found.append(Curve(title, tuple(point.step for point in having), values))
    return found
