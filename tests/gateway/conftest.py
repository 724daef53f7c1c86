"""Stories about a gateway in front of each kind of cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.world import Which, World, world

Story = Callable[[World], Awaitable[None]]


@pytest.fixture(params=["embedded", "kubernetes"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run a story with a gateway; options are those of `world`."""
    which: Which = request.param

    def run(story: Story, **options: Any) -> None:
        async def told() -> None:
            async with world(which, tmp_path, **options) as found:
                await story(found)

        asyncio.run(told())

    return run
