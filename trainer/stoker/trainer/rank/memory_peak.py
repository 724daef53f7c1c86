"""The most memory that a rank takes from a moment on.

On a GPU that is what torch's allocator has given out; on a CPU how much the process's resident memory grows, as Linux
counts it. The latter holds what the interpreter and libraries allocate after that moment, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

RESTART_PEAK = "5"
"""What `/proc/PID/clear_refs` takes to begin a new peak of resident memory."""


class MemoryPeak:
    """Counts from its construction on."""

    def __init__(self, device: torch.device, process: Path = Path("/proc/self")) -> None:
        """`process`: the folder in which the system describes this process."""
        self._device, self._process = device, process
        self._before = None if device.type == "cuda" else self._restart()

    @property
    def is_of_process(self) -> bool:
        """Whether it holds all that the process allocates, and not the tensors of a device alone."""
        return self._device.type != "cuda"

    def bytes(self) -> int | None:
        """Return the most so far; None where the system does not count it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        highest = None if self._before is None else self._counter("VmHWM")
        return None if highest is None or self._before is None else max(highest - self._before, 0)

    def _restart(self) -> int | None:
        """Begin a new peak; return the bytes that are resident now."""
        try:
            (self._process / "clear_refs").write_text(RESTART_PEAK)
        except OSError:
            return None
        return self._counter("VmRSS")

    def _counter(self, name: str) -> int | None:
        """A counter of the process's status, in bytes."""
        try:
            lines = (self._process / "status").read_text().splitlines()
        except OSError:
            return None
        found = next((line.split() for line in lines if line.startswith(f"{name}:")), None)
        return None if found is None else int(found[1]) * 1024
