"""Metrics of a run: speed and time left from the last steps, and the log that the leading rank writes.

Changed by the loop alone, after each step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stoker.checkpoint.storage import path_in_errors
from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.messages import StepEvent, ValidationEvent
from stoker.trainer.rank.metric_targets.target import MetricTarget, step_numbers, validation_numbers

WINDOW = 20
"""Steps that the time left is estimated from."""
MAX_LINE_BYTES = 64 << 10
LINE_START = b'{"kind": '


class StepClock:
    """Measures steps. Time between `start` and `stop` counts; validation and saves outside of it do not."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._started = 0.0
        self.steps = 0
        """Measured so far."""
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def start(self) -> None:
        self._started = self._clock()

    def stop(self) -> float:
        """Seconds of the step."""
        self.steps += 1
        self._recent.append(max(self._clock() - self._started, 1e-9))
        return self._recent[-1]

    @property
    def tokens_per_s(self) -> float:
        """Speed of the last step, over all ranks."""
        return self._tokens_per_step / self._recent[-1]

    def eta_s(self, steps_left: int) -> float:
        """Time left, by the mean of the last steps (without the first, which warms up, when there are others)."""
        steps = list(self._recent)[1:] or list(self._recent)
        return steps_left * sum(steps) / len(steps)


class MetricLog:
    """Writes every `every_steps`-th step and every validation as a JSON line, whole or not at all, and to the targets.

    `path=None` writes no lines.
    """

    def __init__(
        self, path: str | None, every_steps: int, targets: Sequence[MetricTarget] = (), *, completed: bool = False
    ) -> None:
        """Takes the targets over and closes them. `completed`: an earlier attempt has taken the last step."""
        self._every_steps = every_steps
        self._targets = targets
        self._completed = completed
        self._stream: FileIO | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = FileIO(path, "a+")
            with path_in_errors(Path(path)):
                remove_torn_line(self._stream)

    def step(self, event: StepEvent) -> None:
        self._completed = event.step == event.total_steps
        if event.step % self._every_steps == 0 or self._completed:
            self._write("step", event)
            self._send(event.step, step_numbers(event), event.at)

    def validation(self, event: ValidationEvent) -> None:
        self._write("validation", event)
        self._send(event.step, validation_numbers(event), event.at)

    def _send(self, step: int, numbers: dict[str, float], at: float) -> None:
        for target in self._targets:
            target.write(step, numbers, at)

    def loss_spike(self, spike: Mapping[str, Any]) -> None:
        self._append("loss_spike", spike)

    def _write(self, kind: str, event: StepEvent | ValidationEvent) -> None:
        self._append(kind, asdict(event))

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._stream is not None:
            given = {name: value for name, value in fields.items() if value is not None}
            line = json.dumps({"kind": kind, **{name: plain(value) for name, value in given.items()}}) + "\n"
            with path_in_errors(Path(str(self._stream.name))):
                append_line(self._stream, line.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        for target in self._targets:
            with contextlib.suppress(OSError, StorageFailed) if error is not None else contextlib.nullcontext():
                target.close(self._completed and error is None)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: null for a number that is not finite, as the validation of a diverged run."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(stream: FileIO, line: bytes) -> None:
    """Write the whole line, or raise OSError and leave nothing of it in a regular file."""
    rest = line
    try:
        while rest:
            rest = rest[stream.write(rest) :]  # a disk that fills up takes a part of the line first
    except OSError:
        with contextlib.suppress(OSError):
            remove_torn_line(stream)
        raise


def remove_torn_line(stream: FileIO) -> None:
    """Remove the part of a line that a killed process left at the end of a regular file.

    Other text there gets a line end.
    """
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode):
        return
    start = max(0, status.st_size - MAX_LINE_BYTES)
    torn = os.pread(stream.fileno(), MAX_LINE_BYTES, start).rpartition(b"\n")[2]
    if torn and torn[: len(LINE_START)] == LINE_START[: len(torn)]:
        stream.truncate(status.st_size - len(torn))
    elif torn:
        stream.write(b"\n")
