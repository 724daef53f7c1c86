"""The rate limit: a fixed rate in the long run, a burst after a rest."""

from __future__ import annotations

import asyncio

from stoker.operator.cluster.kube.rate_limit import RateLimit
from testing.operator.fakes import FakeClock


def test_a_burst_passes_and_the_rest_waits_its_turn() -> None:
    async def story() -> None:
        clock = FakeClock()
        limit = RateLimit(clock, per_second=2, burst=3)
        done: list[float] = []

        async def ask() -> None:
            await limit.take()
            done.append(clock.monotonic())

        asks = [asyncio.create_task(ask()) for _ in range(7)]
        await clock.advance(10)
        await asyncio.gather(*asks)
        assert done == [0, 0, 0, 0.5, 1.0, 1.5, 2.0]

    asyncio.run(story())


def test_a_rest_refills_no_more_than_a_burst() -> None:
    async def story() -> None:
        clock = FakeClock()
        limit = RateLimit(clock, per_second=100, burst=2)
        await clock.advance(60)
        assert [await limit.take(), await limit.take()] == [0, 0]
        third = asyncio.create_task(limit.take())
        await clock.advance(1)
        assert await third == 0.01

    asyncio.run(story())
