"""What a router tells the autoscaler of requests with a goal that engines do not see: those that wait or are refused.

Owned by `Admission`; shown in `/status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class GoalCounts:
    """Requests of classes with a goal, whatever the class in which they went on."""

    waiting: int = 0
    """Those that wait in the router now."""
    late: int = 0
    """Those so far that went so late that the goal was missed, although their engine kept it."""
    refused: int = 0
    """Those so far that were refused because of the goal, or of a full queue."""

    @contextmanager
    def waits(self, goal_s: float | None) -> Iterator[None]:
        """Count a request as one that waits."""
        counted = int(goal_s is not None)
        self.waiting += counted
        try:
            yield
        finally:
            self.waiting -= counted

    def go(self, goal_s: float | None, waited_s: float, first_token_s: float) -> None:
        """Note that a request goes to an engine, with its predicted first token from there on."""
        if goal_s is not None:
            self.late += first_token_s <= goal_s < waited_s + first_token_s

    def refuse(self, goal_s: float | None, for_goal: bool) -> None:
        """Note that a request is refused."""
        self.refused += goal_s is not None and for_goal

    def as_wire(self) -> dict[str, int]:
        """The `goals` field of `/status`."""
        return asdict(self)
