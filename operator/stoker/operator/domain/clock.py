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
