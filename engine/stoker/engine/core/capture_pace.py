"""When graphs may be captured: each takes 20 to 60 ms, in which the core hears no request. Pure; owned by the core."""

from __future__ import annotations

CAPTURE_SHARE = 0.002
"""Of a busy core's time: at 0.005 captures alone were one first token in a hundred."""
REST_S = 1.0
"""Rest after which any graph is captured. Requests follow one another faster than that while a server is used."""


class CapturePace:
    """Rarely while requests run, so that few of their tokens wait; soon after them only where a lack has cost much."""

    def __init__(self, share: float = CAPTURE_SHARE, rest_s: float = REST_S) -> None:
        self.share, self.rest_s = share, rest_s
        self._due_s = float("-inf")
        self._worked_s = float("-inf")

    def due(self, now_s: float) -> bool:
        """Whether a graph may be captured although requests run."""
        return now_s >= self._due_s

    def worked(self, now_s: float) -> None:
        """Note the end of a step."""
        self._worked_s = now_s

    def rests(self, now_s: float) -> bool:
        """Whether the core has had nothing to do for long."""
        return now_s - self._worked_s >= self.rest_s

    def record(self, began_s: float, ended_s: float) -> None:
        """Note a capture beside requests; the next is due when this one is `share` of the time."""
        self._due_s = ended_s + (ended_s - began_s) / self.share
