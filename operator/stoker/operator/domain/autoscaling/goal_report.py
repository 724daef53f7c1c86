"""The `goals` field of a router's `/status`: requests with a goal that engines do not see. Typed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class GoalReport:
    """One router at one moment, or what happened between two of its reports."""

    waiting: int = 0
    """Requests of classes with a goal that wait in the router."""
    late: int = 0
    """Those so far that waited so long that the goal was missed, although their engine kept it."""
    refused: int = 0
    """Those so far that were refused."""

    def since(self, earlier: GoalReport) -> GoalReport:
        """What happened after `earlier`, with the change of those that wait; nothing if the router began anew."""
        if self.late < earlier.late or self.refused < earlier.refused:
            return GoalReport()
        return GoalReport(self.waiting - earlier.waiting, self.late - earlier.late, self.refused - earlier.refused)

    def plus(self, other: GoalReport) -> GoalReport:
        """The sum of both."""
        return GoalReport(self.waiting + other.waiting, self.late + other.late, self.refused + other.refused)

    @property
    def arrived(self) -> int:
        """Of a growth: requests that no engine counts yet, less those that one has begun to count."""
        return self.waiting + self.refused

    @property
    def missed(self) -> int:
        """Of a growth: requests whose goal was missed before an engine had them."""
        return self.late + self.refused


def read_goals(status: Mapping[str, Any]) -> GoalReport | None:
    """The counts in a router's `/status`; None where there are no classes, or the router is older."""
    found = status.get("goals")
    if not isinstance(found, Mapping):
        return None
    try:
        return GoalReport(**{one.name: int(found[one.name]) for one in fields(GoalReport)})
    except (KeyError, TypeError, ValueError):
        return None
