"""Gangs under Volcano's own scheduler: room for one of two, and a queue whose quota holds one of two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from e2e.api.api_client import Object
from e2e.api.plane import Plane
from e2e.api.test_pod_groups import found_by
from e2e.api.two_gangs import take_turns
from e2e.api.world import Story, World
from e2e.volcano.queues import open_queue

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
