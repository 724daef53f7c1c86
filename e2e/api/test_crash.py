"""The operator dies between any two writes: its successor carries on, and nothing is done twice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from e2e.api.faults import AtWrite, Hang, Hold
from e2e.api.training_story import assert_at_rest, assert_once, begin, to_the_end
from e2e.api.world import NewWorld, Running, World, all_of

WRITES = 24
"""A job of two pods takes about 21 writes from its first status to its last event; what lies behind the last is no crash."""


async def with_a_crash(world: World, write: int) -> bool:
    """The whole life of a job, in which the first operator dies once its n-th write is done, before it hears of it. Whether it came to that."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(world.operator(AtWrite(write, Hang())))
        await begin(world)
        life = asyncio.create_task(to_the_end(world))
        crash = asyncio.create_task(first.proxy.hung.wait())
        await asyncio.wait((life, crash), return_when=asyncio.FIRST_COMPLETED)
        crashed = crash.done()
        crash.cancel()
        last = await _successor(world, first, stack) if crashed else first
        await life
        await assert_once(world)
        await assert_at_rest(last)
        return crashed


async def _successor(world: World, first: Running, stack: AsyncExitStack) -> Running:
    await first.crash()
    return await stack.enter_async_context(world.operator())


def test_a_leader_may_die_after_any_write(new_world: NewWorld) -> None:
    crashes: list[int] = []

    async def one(write: int) -> None:
        async with new_world() as world:
            if await with_a_crash(world, write):
                crashes.append(write)

    asyncio.run(all_of(one, range(1, WRITES + 1)))
    assert set(range(1, 18)) <= set(crashes)


LATE_WRITES = (1, 2, 4, 6, 7, 8, 9, 12, 13)
"""A status, a ConfigMap, a pod, a Checkpoint, ..."""


def test_a_dead_leaders_last_write_may_arrive_when_all_is_over(new_world: NewWorld) -> None:
    """Preconditions and deterministic names make it harmless."""

    async def one(write: int) -> None:
        async with new_world() as world, world.operator(AtWrite(write, Hold())) as first:
            await begin(world)
            life = asyncio.create_task(to_the_end(world))
            await asyncio.wait_for(first.proxy.hung.wait(), 40)
            await first.crash()
            async with world.operator() as second:
                await life
                await second.rest()
                before = await world.get("TrainingJob", "run")
                first.proxy.released.set()
                await asyncio.gather(*first.proxy.late)
                await assert_once(world)
                await assert_at_rest(second)
                assert (await world.get("TrainingJob", "run"))["status"] == before["status"]

    asyncio.run(all_of(one, LATE_WRITES))
