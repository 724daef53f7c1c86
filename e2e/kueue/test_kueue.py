"""Two jobs share one quota of Kueue: a run of higher priority evicts the other, which saves, waits and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from e2e.api.api_client import Object
from e2e.api.fake_agents import saved, training
from e2e.api.plane import Plane
from e2e.api.training_story import CLAIM
from e2e.api.world import Story, World, eventually
from e2e.kueue.quota import GROUP, end, gang, in_phase, installed, open_queue, pods, status, waits_in_the_queue
from stoker.pod.causes import Cause

SAVED, LAST = 60, 70
"""Steps of a save while training, and of the one that a pod makes when it is told to go."""


def last_saves(pod: Object) -> list[dict[str, Any]]:
    """What a trainer leaves that saves on SIGTERM: pod 0 names the saves of all."""
    labels = pod["metadata"]["labels"]
    if labels.get("stoker.dev/node-rank") != "0":
        return []
    return [saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), step) for step in (SAVED, LAST)]


def test_a_run_of_higher_priority_evicts_one_that_saves_waits_and_goes_on(
    with_kueue: Plane, run: Callable[[Story], None]
) -> None:
    async def story(world: World) -> None:
        await open_queue(with_kueue, world)
        found = await installed(with_kueue)
        assert found.kueue
        world.kubelet.last_saves = last_saves
        most = 0

        async def count_running() -> None:
            nonlocal most
            while True:
                live = [pod for pod in await world.list("Pod") if pod["status"].get("phase") == "Running"]
                most = max(most, len(live))
                await asyncio.sleep(0.1)

        async with world.operator(settings=world.settings(installed=found)):
            watching = asyncio.create_task(count_running())
            await world.add(CLAIM)
            await world.add(gang(world, "low", "low"))
            await in_phase(world, "low", "Running")
            assert (await status(world, "low"))["attempt"]["scheduler"] == "kueue"
            leader = next(
                pod for pod in await pods(world, "low") if pod["metadata"]["labels"]["stoker.dev/node-rank"] == "0"
            )
            world.agents.say(
                leader["metadata"]["name"], training(leader["metadata"]["labels"], step=SAVED, saves=(SAVED,))
            )
            first = leader["metadata"]["labels"][GROUP]

            await world.add(gang(world, "high", "high"))
            await in_phase(world, "high", "Running")
            await waits_in_the_queue(world, "low")
            evicted = await status(world, "low")
            assert evicted["attempt"]["number"] == 1
            assert evicted["attempt"]["resumedFrom"]["step"] == LAST, "the save that the eviction asked for"
            assert evicted.get("failuresWithoutProgress", 0) == 0
            assert evicted.get("lostSteps", 0) == 0
            second = {pod["metadata"]["labels"][GROUP] for pod in await pods(world, "low")}
            assert len(second) == 1
            assert second != {first}, "a group that lost its place is over"

            await end(world, "high")
            await in_phase(world, "high", "Completed")
            await in_phase(world, "low", "Running")
            await end(world, "low")
            await in_phase(world, "low", "Completed")
            watching.cancel()
            assert most == 2, "the quota holds two pods"
            reasons = {event["reason"] for event in await world.list("Event")}
            assert "EvictedDueToPreempted" in reasons, reasons

    run(story)


def test_a_suspended_run_holds_no_quota(with_kueue: Plane, run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await open_queue(with_kueue, world)
        world.kubelet.last_saves = last_saves
        async with world.operator(settings=world.settings(installed=await installed(with_kueue))):
            await world.add(CLAIM)
            await world.add(gang(world, "first", "low"))
            await in_phase(world, "first", "Running")
            await world.add(gang(world, "second", "low"))
            await waits_in_the_queue(world, "second")
            await world.api.patch("TrainingJob", world.namespace, "first", {"spec": {"run": {"suspend": True}}})

            async def drained() -> bool:
                return any(path == "/drain" for _, path, _ in world.agents.calls)

            await eventually(drained, what="the run is asked to save")
            for pod in await pods(world, "first"):
                await world.kubelet.end(pod["metadata"]["name"], Cause.INTERRUPTED, step=LAST, saves=last_saves(pod))
            await in_phase(world, "first", "Suspended")
            await in_phase(world, "second", "Running")

    run(story)
