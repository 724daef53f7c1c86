"""Reconcilers and informers on a real API server that is reached through faults: the right end, nothing twice, and rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.api.fake_agents import SAVED_STEP, saved, training
from e2e.api.faults import (
    CONFLICT,
    GONE,
    INTERNAL,
    TOO_MANY,
    UNAVAILABLE,
    AtWrite,
    CutWatch,
    Drop,
    FaultPlan,
    Hang,
    Rule,
    Script,
    Seeded,
    Slow,
)
from e2e.api.plane import Plane
from e2e.api.world import Running, World, eventually, job, world
from stoker.pod.exit_code import Cause

Story = Callable[[World], Awaitable[None]]


@pytest.fixture
def run(plane: Plane, namespace: str, tmp_path: Path) -> Callable[[Story], None]:
    async def whole(story: Story) -> None:
        async with world(plane, namespace, tmp_path) as found:
            await story(found)

    return lambda story: asyncio.run(whole(story))


CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "checkpoints"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


async def begin(world: World, **spec: Any) -> None:
    """A claim and a job of two pods, with pods that train and have saved once."""
    await world.add(CLAIM)
    await world.add(job(**spec))


async def trains(world: World) -> bool:
    """The job is Running; its leader then says that it has saved."""
    status = await world.status("TrainingJob", "run")
    if status.get("phase") != "Running":
        return False
    await let_leader_save(world)
    return True


async def let_leader_save(world: World) -> None:
    leader = next(
        pod for pod in await world.list("Pod") if pod["metadata"]["labels"].get("stoker.dev/node-rank") == "0"
    )
    world.agents.say(leader["metadata"]["name"], training(leader["metadata"]["labels"], step=60, saves=(SAVED_STEP,)))


async def has_saved(world: World) -> bool:
    status = await world.status("TrainingJob", "run")
    return bool((status.get("newestVerifiedCheckpoint") or {}).get("step") == SAVED_STEP)


async def finish(world: World) -> None:
    """All ranks have come to the end."""
    for pod in await world.list("Pod"):
        labels = pod["metadata"]["labels"]
        saves = [saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), SAVED_STEP)]
        await world.kubelet.end(pod["metadata"]["name"], Cause.COMPLETED, step=100, saves=saves)


async def to_the_end(world: World) -> None:
    """From nothing to a job that is Completed."""
    await eventually(lambda: trains(world), what="the job trains")
    await eventually(lambda: has_saved(world), what="its save is verified")
    await finish(world)

    async def completed() -> bool:
        return await world.phase("TrainingJob", "run") == "Completed"

    await eventually(completed, what="the job is Completed")


async def assert_once(world: World, attempts: int = 1) -> None:
    """Each pod of each attempt was made once, and there is one Checkpoint."""
    made = Counter(world.kubelet.created.values())
    assert sorted(made.values()) == [1] * (2 * attempts), made
    found = await world.list("Checkpoint")
    assert [(one["status"]["phase"], one["status"]["step"]) for one in found] == [("Complete", SAVED_STEP)]


async def assert_at_rest(running: Running) -> None:
    """One more pass over everything asks the API server nothing."""
    await running.rest()
    running.proxy.clear()
    await running.look_again()
    assert running.proxy.quiet_calls() == []


async def assert_successor_writes_nothing(world: World) -> None:
    """An operator that starts on what another left reads, and leaves it alone."""
    async with world.operator() as fresh:
        await asyncio.sleep(0.3)
        await fresh.rest()
        assert [call for call in fresh.proxy.calls if call.writes] == []


FAULTS: dict[str, FaultPlan] = {
    "nothing": Script(()),
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
            await assert_at_rest(running)

    run(story)
