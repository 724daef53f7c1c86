"""The metrics log of a run, read from its end: one JSON line per step or validation, appended by the leading rank.

A restart goes back to a checkpoint and appends its steps again. Read backwards, the first line of a step is the one
that counts, and the steps that a restart threw away are those not below the ones read so far. So memory does not grow
with the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20
MAX_LINE = 1 << 20
COLUMNS = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second")
FIELDS = {
    "step": {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm",
             "tokens_per_s": "tokens_per_second"},
    "validation": {"loss": "validation_loss"},
}  # fmt: skip
"""Kind of line -> its field -> column."""


@dataclass(frozen=True)
class Sample:
    """Values of one line: a step and the columns that it has. A value that is not finite is left out."""

    step: int
    values: dict[str, float]


@dataclass
class LogReader:
    """Reads the samples of a log from the newest to the oldest. `unreadable` counts lines that are no JSON object."""

    file: Path
    after_step: int = 0
    until_step: int | None = None
    unreadable: int = 0
    smallest: dict[str, int] = field(default_factory=dict)
    """Kind -> smallest step read so far."""

    def samples(self) -> Iterator[Sample]:
        """Yield the samples with `after_step < step <= until_step`, each step once.

        Raises:
            OSError: the file cannot be read.
        """
        held: Sample | None = None
        for sample in self._counting():
            if held is not None and held.step == sample.step:
                held = Sample(held.step, held.values | sample.values)
                continue
            if held is not None:
                yield held
            held = sample
        if held is not None:
            yield held

    def _counting(self) -> Iterator[Sample]:
        """The lines that count: a step and its validation are two."""
        with self.file.open("rb") as stream:
            for line in lines_from_the_end(stream):
                kind, sample = self._parse(line)
                if sample is None or self._thrown_away(kind, sample.step):
                    continue
                self.smallest[kind] = sample.step
                if sample.step <= self.after_step:
                    if kind == "step":
                        return  # every line before it is of an earlier step, or was thrown away
                elif self.until_step is None or sample.step <= self.until_step:
                    yield sample

    def _thrown_away(self, kind: str, step: int) -> bool:
        """Whether a later part of the log goes back to this step or before it."""
        return any(step > found or (step == found and kind == other) for other, found in self.smallest.items())

    def _parse(self, line: bytes) -> tuple[str, Sample | None]:
        try:
            found = json.loads(line)
            kind = found.get("kind")
            step = int(found["step"]) if kind in FIELDS else 0
            if step < 0:
                raise ValueError(step)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.unreadable += 1
            return "", None
        if kind not in FIELDS:
            return "", None
        given = {column: finite(found.get(name)) for name, column in FIELDS[kind].items()}
        return str(kind), Sample(step, {column: value for column, value in given.items() if value is not None})


def finite(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return number if number - number == 0 else None


def lines_from_the_end(stream: BinaryIO, chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield the whole lines, last first. A last one without a line end is still being written and is left out."""
    end = stream.seek(0, 2)
    rest = b""
    whole = False
    while end > 0:
        start = max(0, end - chunk)
        stream.seek(start)
        parts = (stream.read(end - start) + rest).split(b"\n")
        rest, end = parts[0], start
        if len(rest) > MAX_LINE:
            rest = rest[-1024:]  # no line of a log is so long: what is kept is no JSON object
        if len(parts) == 1:
            continue
        if not whole:
            parts.pop()
            whole = True
        yield from (line for line in reversed(parts[1:]) if line)
    if whole and rest:
        yield rest
