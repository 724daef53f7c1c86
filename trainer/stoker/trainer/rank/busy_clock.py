"""The time that a rank computes in a step, until it is ready to meet the others.

On a GPU the host runs ahead of the device, so events in the current stream take the time; they are read a step later,
when the device has passed them. Waits for other ranks inside of the passes (of `tensor`, `context`, `pipeline` and
experts, and for gathered weights) count as computing.

Held by the training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class BusyClock:
    """Measures from `start` to `stop`, both in the order of the device's work."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._started_s = 0.0
        self._seconds = 0.0
        self._measured = False

    def start(self) -> None:
        if self._events is None:
            self._started_s = self._clock()
        else:
            self._events[0].record()

    def stop(self) -> None:
        self._measured = True
        if self._events is None:
            self._seconds = max(self._clock() - self._started_s, 1e-9)
        else:
            self._events[1].record()

    def seconds(self) -> float:
        """The last measured time; 0 before the first. On a GPU the work before the last `stop` must be done."""
        if self._measured and self._events is not None:
            return max(float(self._events[0].elapsed_time(self._events[1])) / 1e3, 1e-9)
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
