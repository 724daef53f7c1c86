"""When a core audits its cache, and what an audit's findings mean. Pure; owned by the core's loop."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.engine.errors import BlockAuditFailed

AUDIT_IDLE_S, AUDIT_BUSY_S = 10.0, 60.0
"""Interval of cache audits while nothing runs, and while requests run."""
AUDIT_SHARE = 0.005
"""Largest share of the loop's time for audits; a large cache is audited less often."""
SHOWN = 8
"""Most findings of an audit that one message lists."""


class AuditPace:
    """Time of the next audit."""

    def __init__(self, now_s: float) -> None:
        self._due_s = now_s

    def due(self, now_s: float, *, busy: bool) -> bool:
        return now_s >= self._due_s + (AUDIT_BUSY_S - AUDIT_IDLE_S if busy else 0)

    def record(self, began_s: float, ended_s: float) -> None:
        """Note an audit."""
        self._due_s = began_s + max(AUDIT_IDLE_S, (ended_s - began_s) / AUDIT_SHARE)


def failure_of(faults: Sequence[str]) -> BlockAuditFailed:
    """The error that names the first of these findings."""
    more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return BlockAuditFailed(f"cache audit: {'; '.join(faults[:SHOWN])}{more}")
