"""A deployment shares a quota of Kueue with a job: its replicas wait, are evicted whole, come back and are updated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.api.api_client import Object
from e2e.api.plane import Plane
from e2e.api.training_story import CLAIM
from e2e.api.world import Story, World, eventually
from e2e.kueue.quota import GROUP, end, gang, in_phase, installed, open_queue

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-in-queue" / "serve.yaml"
GATE = "kueue.x-k8s.io/admission"


def deployment(world: World, **pool: Any) -> Object:
    """The example with one replica of two pods with one CPU each, which a run of high priority evicts."""
    found: Object = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    (main,) = found["spec"]["pools"]
    small = {
        "replicas": 1,
        "gpusPerPod": 0,
        "parallelism": {"tensor": main["podsPerReplica"]},
        "resources": {"requests": {"cpu": "1", "memory": "64Mi"}},
        "priorityClassName": f"{world.namespace}-low",
        "maxSurge": 1,
        "maxUnavailable": 0,
    }
    spec = {"model": {"uri": "hf://org/model"}, "pools": [{**main, **small, **pool}]}
    return {**found, "metadata": {"name": "chat"}, "spec": spec}


async def engines(world: World) -> list[Object]:
    return [pod for pod in await world.list("Pod") if pod["metadata"]["labels"].get("stoker.dev/role") == "engine"]


async def pool(world: World) -> Object:
    """The status of the deployment's EnginePool; empty before there is one."""
    return next((found.get("status") or {} for found in await world.list("EnginePool")), {})


async def serves(world: World, replicas: int) -> None:
    """Wait until all replicas are ready and no other pod is left."""

    async def reached() -> bool:
        found, wanted = await world.status("InferenceDeployment", "chat"), f"{replicas}/{replicas}"
        whole = len(await engines(world)) == 2 * replicas
        return whole and (found.get("phase"), found.get("ready")) == ("Serving", wanted)

    await soon(world, reached, f"{replicas} replicas serve")


async def one_waits(world: World, ready: int) -> set[str]:
    """Wait until one replica is in the queue and `ready` serve; return the group of the one that waits."""

    async def reached() -> bool:
        found = await pool(world)
        line = "waits for kueue, queue team" in str(found.get("message"))
        return line and (found.get("queuedReplicas"), found.get("readyReplicas")) == (1, ready)

    await soon(world, reached, f"{ready} replicas serve and one waits")
    held = [pod for pod in await engines(world) if pod["spec"].get("schedulingGates")]
    assert len(held) == 2
    assert all(GATE in [gate["name"] for gate in pod["spec"]["schedulingGates"]] for pod in held)
    assert not (await pool(world)).get("failures")
    return {pod["metadata"]["labels"][GROUP] for pod in held}


async def soon(world: World, reached: Callable[[], Any], what: str) -> None:
    try:
        await eventually(reached, within_s=180, what=what)
    except AssertionError as error:
        found = [
            (pod["metadata"]["name"], pod["metadata"].get("finalizers"), pod["status"]) for pod in await engines(world)
        ]
        status = await world.status("InferenceDeployment", "chat")
        raise AssertionError(f"{error}; {status}; {await pool(world)}; {found}") from error


async def edit(world: World, **fields: Any) -> None:
    """Change fields of the pool."""
    found = await world.get("InferenceDeployment", "chat")
    pools = [{**found["spec"]["pools"][0], **fields}]
    await world.api.patch("InferenceDeployment", world.namespace, "chat", {"spec": {"pools": pools}})


class MostPods:
    """The most pods of groups of Kueue that were seen to run at the same time."""

    def __init__(self) -> None:
        self.number = 0

    @asynccontextmanager
    async def counted(self, world: World) -> Any:
        task = asyncio.create_task(self._count(world))
        try:
            yield self
        finally:
            task.cancel()

    async def _count(self, world: World) -> None:
        while True:
            live = [pod for pod in await world.list("Pod") if GROUP in pod["metadata"]["labels"]]
            self.number = max(self.number, sum(pod["status"].get("phase") == "Running" for pod in live))
            await asyncio.sleep(0.1)


def test_a_replica_is_evicted_whole_for_a_job_waits_and_serves_again(
    with_kueue: Plane, run: Callable[[Story], None]
) -> None:
    async def story(world: World) -> None:
        await open_queue(with_kueue, world)
        world.kubelet.last_saves = lambda _: []
        most = MostPods()
        async with (
            world.operator(settings=world.settings(installed=await installed(with_kueue))),
            most.counted(world),
        ):
            await world.add(CLAIM)
            await world.add(deployment(world))
            await serves(world, 1)
            first = {pod["metadata"]["labels"][GROUP] for pod in await engines(world)}
            assert len(first) == 1

            await world.add(gang(world, "high", "high"))
            await in_phase(world, "high", "Running")
            second = await one_waits(world, ready=0)
            assert len(second) == 1
            assert second != first, "a group that lost its place is over"
            await end(world, "high")
            await in_phase(world, "high", "Completed")
            await serves(world, 1)
            assert {pod["metadata"]["labels"][GROUP] for pod in await engines(world)} == second
            assert most.number == 2, "the quota holds two pods"
            reasons = {event["reason"] for event in await world.list("Event")}
            assert "EvictedDueToPreempted" in reasons, reasons
            assert "PodLost" not in reasons, "a replica is evicted whole"

    run(story)


def test_an_update_waits_for_quota_and_a_replica_that_waits_is_dropped_first(
    with_kueue: Plane, run: Callable[[Story], None]
) -> None:
    async def story(world: World) -> None:
        await open_queue(with_kueue, world)
        world.kubelet.last_saves = lambda _: []
        settings = world.settings(installed=await installed(with_kueue), drain_timeout_s=1)
        async with world.operator(settings=settings):
            await world.add(deployment(world))
            await serves(world, 1)
            old = {pod["metadata"]["uid"] for pod in await engines(world)}
            await edit(world, env=[{"name": "MORE", "value": "1"}])
            await one_waits(world, ready=1)
            assert old < {pod["metadata"]["uid"] for pod in await engines(world)}
            assert await world.phase("InferenceDeployment", "chat") == "Updating"
            await open_queue(with_kueue, world, cpus=4)
            await serves(world, 1)
            assert not old & {pod["metadata"]["uid"] for pod in await engines(world)}

            await edit(world, replicas=3)
            await one_waits(world, ready=2)
            kept = {pod["metadata"]["uid"] for pod in await engines(world) if not pod["spec"].get("schedulingGates")}
            await edit(world, replicas=2)
            await serves(world, 2)
            assert {pod["metadata"]["uid"] for pod in await engines(world)} == kept

    run(story)
