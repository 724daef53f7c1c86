"""The share of a busy core's time that captures of graphs may take. Pure; owned by the core's loop."""

from __future__ import annotations

CAPTURE_SHARE = 0.005


class CapturePace:
    """When a graph may be captured although requests run: rarely, so that few of their tokens wait for it."""

    def __init__(self, share: float = CAPTURE_SHARE) -> None:
        self.share = share
        self._due_s = float("-inf")

    def due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def record(self, began_s: float, ended_s: float) -> None:
        """Note a capture; the next is due when this one is `share` of the time."""
        self._due_s = ended_s + (ended_s - began_s) / self.share
