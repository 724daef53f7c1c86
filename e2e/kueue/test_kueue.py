"""Two jobs share one quota of Kueue: a run of higher priority evicts the other, which saves, waits and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from e2e.api.api_client import Object
from e2e.api.fake_agents import TOTAL_STEPS, saved, training
from e2e.api.plane import Plane
from e2e.api.training_story import CLAIM
from e2e.api.world import Reached, Story, World, eventually, job
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.schedulers import Installed
from stoker.operator.service.discovery import discover
from stoker.pod.causes import Cause

SAVED, LAST = 60, 70
"""Steps of a save while training, and of the one that a pod makes when it is told to go."""
GROUP = "kueue.x-k8s.io/pod-group-name"


def queue(world: World) -> list[Object]:
    """A quota of two CPUs, its queue in the test's namespace, and two priorities."""
    name, api = world.namespace, "kueue.x-k8s.io/v1beta1"
    quota = [{"name": "cpu", "nominalQuota": "2"}, {"name": "memory", "nominalQuota": "1Ti"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quota}]}
    cluster_queue = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    priorities = [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{name}-{kind}"},
            "value": value,
        }
        for kind, value in (("low", 10), ("high", 1000))
    ]
    local = {"name": "team", "namespace": name}
    return [
        *priorities,
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": {}},
        {"apiVersion": api, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": cluster_queue},
        {"apiVersion": api, "kind": "LocalQueue", "metadata": local, "spec": {"clusterQueue": name}},
    ]


def gang(world: World, name: str, priority: str) -> Object:
    """A job of two pods with one CPU each, for Kueue."""
    resources = {"requests": {"cpu": "1", "memory": "64Mi"}}
    workers = {"replicas": 2, "resources": resources, "priorityClassName": f"{world.namespace}-{priority}"}
    return job(name, workers=workers, scheduling={"backend": "kueue", "queueName": "team"})


async def installed(plane: Plane) -> Installed:
    """What the operator finds by asking the API server."""
    clock = SystemClock()
    connection = ApiConnection(Access(str(plane.kubeconfig)), RateLimit(clock, per_second=100, burst=100))
    try:
        return await discover(connection)
    finally:
        await connection.close()


async def status(world: World, name: str) -> Object:
    return await world.status("TrainingJob", name)


async def pods(world: World, name: str) -> list[Object]:
    """The trainer pods of a job that have not ended."""
    found = await world.list("Pod")
    mine = [pod for pod in found if pod["metadata"]["labels"].get("stoker.dev/job") == name]
    return [pod for pod in mine if pod["status"]["phase"] in ("Pending", "Running")]


def gated(found: list[Object]) -> bool:
    gates = [[gate["name"] for gate in pod["spec"].get("schedulingGates") or ()] for pod in found]
    return len(found) == 2 and all("kueue.x-k8s.io/admission" in each for each in gates)


async def in_phase(world: World, name: str, phase: str) -> None:
    async def reached() -> bool:
        return bool((await status(world, name)).get("phase") == phase)

    await soon(world, name, reached, phase)


async def waits_in_the_queue(world: World, name: str) -> None:
    async def waits() -> bool:
        found = await status(world, name)
        return gated(await pods(world, name)) and found.get("message") == "the gang waits for kueue, queue team"

    await soon(world, name, waits, "in Kueue's queue")


async def soon(world: World, name: str, reached: Reached, what: str) -> None:
    try:
        await eventually(reached, within_s=120, what=f"{name} is {what}")
    except AssertionError as error:
        found = [
            (pod["metadata"], pod["spec"].get("schedulingGates"), pod["status"]) for pod in await pods(world, name)
        ]
        raise AssertionError(f"{error}; {await status(world, name)}; {found}") from error


async def end(world: World, name: str) -> None:
    """Let every pod of a job finish."""
    for pod in await pods(world, name):
        labels = pod["metadata"]["labels"]
        saves = [saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), TOTAL_STEPS)]
        await world.kubelet.end(pod["metadata"]["name"], Cause.COMPLETED, step=TOTAL_STEPS, saves=saves)


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
        for body in queue(world):
            await asyncio.to_thread(with_kueue.kubectl, "apply", "-f", "-", stdin=body)
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
        for body in queue(world):
            await asyncio.to_thread(with_kueue.kubectl, "apply", "-f", "-", stdin=body)
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
