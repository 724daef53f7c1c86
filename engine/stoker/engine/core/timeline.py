"""A time line of an engine: one JSON line per step and per request, to find out what a slow token waited for.

Written only where the configuration names a file (`timeline`); else `NO_TIMELINE` takes the calls. All times are
`time.monotonic()` seconds, which a client on the same machine shares.

Made by `core.build`, called by the engine and the core's loop in one thread. `bench/gpu/serve_timeline.py` reads the
file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

from stoker.engine.core.request import Sequence
from stoker.engine.core.schedule import Schedule
from stoker.engine.execution.executor import PendingOutput
from stoker.engine.execution.step import StepTrace

Mark = Literal["begun", "planned", "built", "submitted", "waiting", "waited", "taken", "sent"]
"""Moments of a step: its planning begins and ends, its input is built, it is submitted; the wait for its output begins
and ends, its tokens are in their sequences, its deltas are on the wire."""


class Timeline(Protocol):
    """What the engine tells of its work."""

    def mark(self, step: int, moment: Mark) -> None:
        """Note the time of a moment of a step."""
        ...

    def taken(self, step: int, schedule: Schedule, pending: PendingOutput) -> None:
        """Note a step whose tokens are in their sequences."""
        ...

    def sent(self) -> None:
        """Write all taken steps: their deltas are on the wire."""
        ...

    def captured(self, began_s: float) -> None:
        """Note the capture of a graph between two steps."""
        ...

    def queued(self, request_id: str) -> None:
        """Note a request that the engine has accepted."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Note a choice that has ended."""
        ...

    def close(self) -> None:
        """End the time line."""
        ...


class NoTimeline:
    """Keeps nothing."""

    def mark(self, step: int, moment: Mark) -> None:
        pass

    def taken(self, step: int, schedule: Schedule, pending: PendingOutput) -> None:
        pass

    def sent(self) -> None:
        pass

    def captured(self, began_s: float) -> None:
        pass

    def queued(self, request_id: str) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


NO_TIMELINE = NoTimeline()


class FileTimeline:
    """A time line in a file of JSON lines, written anew."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError where the file cannot be written."""
        self.clock = clock
        self._file = file.open("w", buffering=1 << 16)
        self._open: dict[int, dict[str, Any]] = {}
        self._taken: list[int] = []
        self._queued_s: dict[str, float] = {}

    def mark(self, step: int, moment: Mark) -> None:
        self._open.setdefault(step, {"step": step})[moment] = self.clock()

    def taken(self, step: int, schedule: Schedule, pending: PendingOutput) -> None:
        self.mark(step, "taken")
        lengths = [chunk.length for chunk in schedule.chunks if not (chunk.length == 1 and chunk.samples)]
        self._open[step] |= {
            "tokens": schedule.num_tokens,
            "decodes": len(schedule.chunks) - len(lengths),
            "prompts": len(lengths),
            "opened": len(schedule.opened),
        }
        trace = getattr(pending, "trace", None)
        if isinstance(trace, StepTrace):
            self._open[step] |= asdict(trace)
        self._taken.append(step)

    def sent(self) -> None:
        for step in self._taken:
            self.mark(step, "sent")
            self._write(self._open.pop(step))
        self._taken.clear()

    def captured(self, began_s: float) -> None:
        self._write({"capture": began_s, "ended": self.clock()})

    def queued(self, request_id: str) -> None:
        self._queued_s[request_id] = self.clock()

    def ended(self, sequence: Sequence) -> None:
        request_id = sequence.request.key[1]
        queued_s = self._queued_s.pop(request_id, None)
        self._write({"request": request_id, "queued_s": queued_s} | asdict(sequence.facts(self.clock())))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
