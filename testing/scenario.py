"""A scenario of a test in an event loop of its own: waiting for states, limits, the events of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any


async def until(question: Callable[[], bool], timeout_s: float = 240.0) -> None:
    """Wait for a state; a test that needs longer has failed."""
    async with asyncio.timeout(timeout_s):
        while not question():
            await asyncio.sleep(0.005)


def run(scenario: Callable[[], Awaitable[None]], limit_s: float = 300) -> None:
    """Run a scenario in a fresh event loop, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(limited())


def events(text: str) -> list[Any]:
    """Return the content of a stream's `data:` lines; `[DONE]` stays a string. A silent stream's comments are none."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
