"""Two replicas and room for one and a half, under a scheduler of others: whole or not at all; more room, and both."""

from __future__ import annotations

import re
from typing import Any

from e2e.api.api_client import Object
from e2e.api.test_gang_placement import nodes
from e2e.api.two_gangs import ROOM, WITHIN_S, is_refused, scheduled
from e2e.api.world import World, eventually
from stoker.operator.domain.schedulers import Installed


def deployment(scheduling: Object) -> Object:
    """Two replicas of two pods with two GPUs each."""
    pool = {
        "name": "main",
        "replicas": 2,
        "podsPerReplica": 2,
        "gpusPerPod": 2,
        "parallelism": {"tensor": 4},
        "scheduling": scheduling,
    }
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": "hf://org/model"}, "pools": [pool]},
    }


async def start_whole(world: World, installed: Installed, groups: str, reason: str, scheduling: Object) -> None:
    """Tell the whole story: one replica serves, one waits with no pod on a node, and serves with one node more.

    Args:
        groups: apiVersion of the scheduler's PodGroups.
        reason: expression for what the pool says of the replica that waits.
        scheduling: of the pool.
    """
    async with scheduled(world, installed, ROOM):
        await world.add(deployment(scheduling))
        await count(world, ready=1, queued=1, message=reason)
        pods = await engines(world)
        waiting = {pod["metadata"]["labels"]["stoker.dev/replica"] for pod in pods if is_refused(pod)}
        assert len(waiting) == 1
        assert sum(bool(pod["spec"].get("nodeName")) for pod in pods) == 2, "no pod of a replica starts alone"
        assert not any(pod["spec"].get("schedulingGates") for pod in pods)
        assert await owners(world, groups) == leaders(pods)

        async with nodes(world, c=2):
            await count(world, ready=2, queued=0, message="")
            later = await engines(world)
            assert uids(later) == uids(pods), "the replica that waited kept its pods"
            assert all(pod["spec"].get("nodeName") for pod in later)


async def count(world: World, ready: int, queued: int, message: str) -> None:
    """Wait until the pool counts so many replicas, and says so."""
    status: Object = {}

    async def reached() -> bool:
        nonlocal status
        status = next((pool.get("status") or {} for pool in await world.list("EnginePool")), {})
        counts = status.get("readyReplicas"), status.get("queuedReplicas") or 0
        return counts == (ready, queued) and bool(re.search(message, str(status.get("message"))))

    try:
        await eventually(reached, within_s=WITHIN_S, what=f"{ready} replicas serve and {queued} wait")
    except AssertionError as error:
        states: list[Any] = [(pod["spec"].get("nodeName"), pod["status"]) for pod in await engines(world)]
        raise AssertionError(f"{error}; {status}; {states}") from error


async def engines(world: World) -> list[Object]:
    return [pod for pod in await world.list("Pod") if pod["metadata"]["labels"].get("stoker.dev/role") == "engine"]


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def leaders(pods: list[Object]) -> set[str]:
    """The first pods of the replicas, by uid."""
    return uids([pod for pod in pods if pod["metadata"]["labels"]["stoker.dev/node-rank"] == "0"])


async def owners(world: World, groups: str) -> set[str]:
    """The pods that the PodGroups belong to, by uid."""
    answer = await world.api.ask("GET", f"apis/{groups}/namespaces/{world.namespace}/podgroups")
    return {group["metadata"]["ownerReferences"][0]["uid"] for group in answer["items"]}
