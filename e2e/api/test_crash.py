"""Crashes of the operator between any two writes: its successor carries on and repeats nothing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from e2e.api.faults import AtWrite, FaultPlan, Hang, Hold, Rule, Script
from e2e.api.training_story import assert_at_rest, assert_once, begin, to_the_end
from e2e.api.world import NewWorld, Running, World, all_of

SURE_WRITES = 12
"""Number of writes that every run reaches.

A job of two pods takes 16 to 21 writes from its first status to its last event, depending on the changes per status.
"""
NTH_WRITE = {f"write {write}": AtWrite(write, Hang()) for write in range(1, 25)}
WRITTEN = (
    ("update", "trainingjobs/status"),
    ("apply", "configmaps"),
    ("apply", "services"),
    ("create", "pods"),
    ("create", "events"),
    ("create", "checkpoints"),
    ("update", "checkpoints/status"),
)
"""Every write in the life of a job."""
FIRST_WRITE = {f"{verb} {what}": Script((Rule(Hang(), verb, what),)) for verb, what in WRITTEN}


async def with_a_crash(world: World, plan: FaultPlan) -> bool:
    """Run the whole life of a job whose first operator dies after a write, before the answer reaches it.

    Return whether the life has that write.

    Whether it came to that write.
    """
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(world.operator(plan))
        await begin(world)
        life = asyncio.create_task(to_the_end(world))
        crashed = await _comes_to_it(first, life)
        last = await _successor(world, first, stack) if crashed else first
        await life
        await assert_once(world)
        await assert_at_rest(last)
        return crashed


async def _comes_to_it(first: Running, life: asyncio.Task[None]) -> bool:
    """Wait for the write and return whether it is done; False once the job's life is over without it."""

    async def over() -> None:
        await asyncio.wait((life,))
        await first.rest()

    crash, end = asyncio.create_task(first.proxy.hung.wait()), asyncio.create_task(over())
    await asyncio.wait((crash, end), return_when=asyncio.FIRST_COMPLETED)
    crashed = crash.done()
    crash.cancel()
    end.cancel()
    return crashed


async def _successor(world: World, first: Running, stack: AsyncExitStack) -> Running:
    await first.crash()
    return await stack.enter_async_context(world.operator())


def test_a_leader_may_die_after_any_write(new_world: NewWorld) -> None:
    plans: dict[str, FaultPlan] = {**NTH_WRITE, **FIRST_WRITE}
    names = list(plans)
    crashes: set[str] = set()

    async def one(number: int) -> None:
        async with new_world() as world:
            if await with_a_crash(world, plans[names[number]]):
                crashes.add(names[number])

    asyncio.run(all_of(one, range(len(names))))
    assert crashes >= {*FIRST_WRITE, *list(NTH_WRITE)[:SURE_WRITES]}


LATE_WRITES = (1, 2, 4, 6, 7, 8, 9, 10, SURE_WRITES)
"""A status, a ConfigMap, a pod, a Checkpoint, ..."""


def test_a_dead_leaders_last_write_may_arrive_when_all_is_over(new_world: NewWorld) -> None:
    """Preconditions and deterministic names make the late write harmless."""

    async def one(write: int) -> None:
        async with new_world() as world, world.operator(AtWrite(write, Hold())) as first:
            await begin(world)
            life = asyncio.create_task(to_the_end(world))
            await asyncio.wait_for(first.proxy.hung.wait(), 240)
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
