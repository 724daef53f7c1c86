"""Gangs and replicas under Volcano's own scheduler: room or a queue's quota for one of two, and a gang that returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from e2e.api.api_client import Object
from e2e.api.fake_agents import TOTAL_STEPS
from e2e.api.plane import Plane
from e2e.api.test_gang_placement import gang
from e2e.api.test_pod_groups import found_by
from e2e.api.two_gangs import bound, held_back, in_phase, pods, scheduled, take_turns
from e2e.api.whole_replicas import start_whole
from e2e.api.world import Story, World
from e2e.volcano.queues import open_queue
from stoker.pod.causes import Cause

REASON = "pod group is not ready"


def queue(world: World) -> Object:
    """A queue of the test's own with a quota of four GPUs."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "Queue",
        "metadata": {"name": world.namespace},
        "spec": {"weight": 1, "capability": {"nvidia.com/gpu": "4"}},
    }


def test_two_gangs_with_room_for_one_take_turns_and_none_starts_in_part(
    with_volcano: Plane, run: Callable[[Story], None]
) -> None:
    async def story(world: World) -> None:
        await take_turns(world, await found_by(with_volcano), "volcano", REASON, {"backend": "volcano"})

    run(story)


def test_two_gangs_share_the_quota_of_a_queue(with_volcano: Plane, run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await asyncio.to_thread(with_volcano.kubectl, "apply", "-f", "-", stdin=queue(world))
        await asyncio.to_thread(open_queue, with_volcano, world.namespace)
        scheduling = {"backend": "volcano", "queueName": world.namespace}
        await take_turns(world, await found_by(with_volcano), "volcano", REASON, scheduling, gpus={"a": 4, "b": 4})

    run(story)


def test_replicas_start_whole_and_one_waits_for_a_node(with_volcano: Plane, run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        installed, reason = await found_by(with_volcano), f"waits for volcano: .*{REASON}"
        await start_whole(world, installed, "scheduling.volcano.sh/v1beta1", reason, {"backend": "volcano"})

    run(story)


def holder(world: World) -> Object:
    """Another user's pod with two GPUs of the test's node."""
    container = {"name": "main", "image": "busybox", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "holder", "namespace": world.namespace, "labels": {"app": "holder"}},
        "spec": {"nodeName": f"{world.namespace}-a", "containers": [container]},
    }


def test_a_pod_that_succeeded_is_no_member_of_the_next_gang(with_volcano: Plane, run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with scheduled(world, await found_by(with_volcano), {"a": 4}):
            await world.add(gang(world, "first", scheduling={"backend": "volcano"}))
            await in_phase(world, "first", "Running")
            leader, other = sorted(pod["metadata"]["name"] for pod in await pods(world, "first"))
            await world.kubelet.end(other, Cause.COMPLETED, step=TOTAL_STEPS)
            await world.api.create(holder(world))
            await world.kubelet.end(leader, Cause.OUT_OF_MEMORY)
            await held_back(world, "first", "1 Insufficient nvidia.com/gpu")
            await world.api.delete("Pod", world.namespace, "holder")
            await in_phase(world, "first", "Running")
            assert await bound(world, "first") == 2

    run(story)
