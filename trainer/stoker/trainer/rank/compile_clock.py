"""The time in which Triton compiled kernels since a rank's start; kernels of its cache on disk cost nothing.

Made by `build`, read by the loop after the first step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stoker.model.kernels.ahead.layered_cache import KernelLookups

log = logging.getLogger("stoker.trainer")


class CompileClock:
    """Adds up what Triton reports about each compilation. On a CPU no kernel is compiled."""

    def __init__(self, device: torch.device, lookups: KernelLookups | None = None) -> None:
        """`lookups`: of the shipped kernels, where the process looks there."""
        self.seconds = 0.0
        self._lookups = lookups
        if device.type == "cuda":
            import triton

            triton.knobs.compilation.listener = self.note

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's listener; `times.total` is in microseconds."""
        if not cache_hit:
            self.seconds += times.total / 1e6

    def end_first_step(self) -> float:
        """Return the seconds so far, and log where the kernels came from: a warning if some had to be compiled."""
        if self._lookups is not None:
            level = logging.WARNING if self._lookups.compiled else logging.INFO
            log.log(level, "kernels of the first step: %s", self._lookups.describe())
        return self.seconds
