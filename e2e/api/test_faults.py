"""Reconcilers and informers on a real API server behind faults: they reach the right end, repeat nothing, and rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from e2e.api.faults import (
    CONFLICT,
    GONE,
    INTERNAL,
    TOO_MANY,
    UNAVAILABLE,
    CutWatch,
    Drop,
    FaultPlan,
    NoFaults,
    Rule,
    Script,
    Seeded,
    Slow,
)
from e2e.api.training_story import (
    assert_at_rest,
    assert_once,
    assert_successor_writes_nothing,
    begin,
    finish,
    has_saved,
    to_the_end,
    trains,
)
from e2e.api.world import NewWorld, ScaledClock, Story, World, all_of, eventually

FAULTS: dict[str, FaultPlan] = {
    "nothing": NoFaults(),
    "409 on the first status": Script((Rule(CONFLICT, "update", "trainingjobs/status"),)),
    "409 on every second status": Script(
        tuple(Rule(CONFLICT, "update", "trainingjobs/status", first) for first in (1, 3, 5))
    ),
    "409 on a pod": Script((Rule(CONFLICT, "create", "pods", 2),)),
    "410 on the first lists": Script((Rule(GONE, "list", count=2),)),
    "410 on the first watches": Script((Rule(GONE, "watch", count=2),)),
    "410 within watches": Script(
        (Rule(CutWatch("gone"), "watch"), Rule(CutWatch("gone", 2), "watch", first=2, count=2))
    ),
    "429 on everything once": Script((Rule(TOO_MANY),)),
    "500 on everything once": Script((Rule(INTERNAL),)),
    "503 on everything twice": Script((Rule(UNAVAILABLE, count=2),)),
    "500 within watches": Script((Rule(CutWatch("error", 1), "watch", count=3),)),
    "each first request lost": Script((Rule(Drop()),)),
    "each first answer lost": Script((Rule(Drop(after=True)),)),
    "each second answer lost": Script((Rule(Drop(after=True), first=2),)),
    "watches broken off": Script((Rule(CutWatch("drop", 1), "watch", count=4),)),
    "watches ended early": Script((Rule(CutWatch("end", 1), "watch", count=4),)),
    "slow lists": Script((Rule(Slow(0.5), "list"), Rule(Slow(1.5), "list", "pods", count=2))),
}


@pytest.mark.parametrize("plan", [pytest.param(plan, id=name) for name, plan in FAULTS.items()])
def test_a_job_comes_to_its_end_through(run: Callable[[Story], None], plan: FaultPlan) -> None:
    async def story(world: World) -> None:
        async with world.operator(plan) as running:
            await begin(world)
            await to_the_end(world)
            await assert_once(world)
            assert plan == NoFaults() or running.proxy.injected
            await assert_at_rest(running)

    run(story)


def test_jobs_come_to_their_ends_through_random_faults(new_world: NewWorld) -> None:
    """Every request may fail in every way; a failing seed is named and can be run again alone."""

    async def one(seed: int) -> None:
        async with new_world() as world, world.operator(Seeded(seed, rate=0.25)) as running:
            await begin(world)
            await to_the_end(world)
            await assert_once(world)
            assert running.proxy.injected
            running.proxy.plan = NoFaults()
            await assert_at_rest(running)

    asyncio.run(all_of(one, range(12)))


def test_silent_watches_are_found_out(run: Callable[[Story], None]) -> None:
    """Every kind is listed again after the longest silence of an open connection, here a fortieth of it."""

    async def story(world: World) -> None:
        deaf = Script((Rule(CutWatch("silent"), "watch", count=2),))
        async with world.operator(deaf, clock=ScaledClock(40)) as running:
            await begin(world)
            await to_the_end(world)
            await assert_once(world)
            assert running.proxy.counts["list", "trainingjobs"] > 1
        await assert_successor_writes_nothing(world)

    run(story)


def test_an_api_server_that_restarts_costs_nothing_but_time(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world)
            await eventually(lambda: trains(world), what="the job trains")
            world.plane.control_plane.stop_api_server()
            await asyncio.sleep(1)
            # In this thread: the kernel ends the server with the thread that started it.
            world.plane.control_plane.start_api_server()
            await eventually(lambda: has_saved(world), what="its save is verified")
            await finish(world)
            await eventually(lambda: has_phase(world, "Completed"), what="the job is Completed")
            await assert_once(world)
            await assert_at_rest(running, quiet_s=2)

    run(story)


async def has_phase(world: World, phase: str) -> bool:
    return await world.phase("TrainingJob", "run") == phase
