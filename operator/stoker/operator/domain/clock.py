"""Time as an input: the operator's machinery reads a `Clock`, never the system.

Made by the programs and by tests, passed to everything that waits or measures.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for what people read, monotonic time for what is measured."""

    def now(self) -> datetime:
        """Wall time, aware, in UTC."""

    def monotonic(self) -> float:
        """Monotonic time in seconds."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def timestamp(moment: datetime) -> str:
    """The time in the form of Kubernetes: `2026-01-31T12:00:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_ahead(since: datetime, limit_s: float, now: datetime) -> bool:
    """Whether a wait seems to begin later than a whole one from now: the clock was put back.

    Such a wait would last for as long as the clock had been ahead.
    """
    return (since - now).total_seconds() > limit_s


def rest_s(since: datetime, limit_s: float, now: datetime) -> float:
    """Seconds left of a wait that the operator began at `since`; 0 when it is over, or lies ahead."""
    return 0.0 if is_ahead(since, limit_s, now) else max(limit_s - (now - since).total_seconds(), 0.0)
