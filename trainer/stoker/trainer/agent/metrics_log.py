"""The JSONL log of a run: one object per step, validation and save, appended by the agent of node 0.

A resumed run appends to the same file; steps that it repeats are there twice, the later line counts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from stoker.trainer.beacon import Event, SaveEvent, StepEvent, ValidationEvent

KINDS: dict[type[Event], str] = {StepEvent: "step", ValidationEvent: "validation", SaveEvent: "save"}


class MetricsLog:
    """An open log. `every_steps` thins out the steps, never validations and saves; the last step is always there."""

    def __init__(self, path: Path, attempt: int, every_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")
        self._attempt, self._every_steps = attempt, every_steps

    def write(self, event: Event) -> None:
        kind = KINDS.get(type(event))
        if kind is None or (isinstance(event, StepEvent) and not due(event, self._every_steps)):
            return
        record: dict[str, Any] = {"event": kind, "attempt": self._attempt, **asdict(event)}
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def due(event: StepEvent, every_steps: int) -> bool:
    return event.step % every_steps == 0 or event.step == event.total_steps
