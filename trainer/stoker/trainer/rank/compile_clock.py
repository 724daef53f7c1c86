"""The time in which Triton compiled kernels since a rank's start; kernels of its cache on disk cost nothing.

Made by `build`, read by the loop after the first step.
"""

from __future__ import annotations

from typing import Any

import torch


class CompileClock:
    """Adds up what Triton reports about each compilation. On a CPU no kernel is compiled."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        if device.type == "cuda":
            import triton

            triton.knobs.compilation.listener = self.note

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's listener; `times.total` is in microseconds."""
        if not cache_hit:
            self.seconds += times.total / 1e6
