"""Two gangs and room for one under a scheduler of others: whole or not at all, and a suspended run holds no room.

One story for every scheduler that takes whole gangs; the kubelet starts only what that scheduler has bound.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from e2e.api.api_client import Object
from e2e.api.fake_agents import TOTAL_STEPS, saved
from e2e.api.test_gang_placement import gang, nodes
from e2e.api.training_story import CLAIM
from e2e.api.world import Reached, World, eventually
from stoker.operator.domain.schedulers import Installed
from stoker.pod.causes import Cause

WITHIN_S = 240
SAVED = 60
"""Step of the save that a drain asks for."""


ROOM: Mapping[str, int] = MappingProxyType({"a": 4, "b": 2})
"""GPUs of nodes with room for one gang of two pods with two GPUs each, and for one pod more."""


async def take_turns(
    world: World,
    installed: Installed,
    scheduler: str,
    reason: str,
    scheduling: Object,
    gpus: Mapping[str, int] = ROOM,
) -> None:
    """Tell the whole story: the first runs, the second waits, both take turns by `suspend` and by an end.

    Args:
        reason: what the message of a gang that is held back has.
        scheduling: of both jobs.
        gpus: of each node.
    """
    async with scheduled(world, installed, gpus):
        await world.add(gang(world, "first", scheduling=scheduling))
        await in_phase(world, "first", "Running")
        assert (await world.status("TrainingJob", "first"))["attempt"]["scheduler"] == scheduler
        await world.add(gang(world, "second", scheduling=scheduling))
        await held_back(world, "second", reason)

        await suspend(world, "first")
        await in_phase(world, "first", "Suspended")
        await in_phase(world, "second", "Running")
        assert await bound(world, "second") == 2

        await world.api.patch("TrainingJob", world.namespace, "first", {"spec": {"run": {"suspend": False}}})
        await held_back(world, "first", reason)
        await end(world, "second", Cause.COMPLETED, TOTAL_STEPS)
        await in_phase(world, "second", "Completed")
        await in_phase(world, "first", "Running")
        assert await bound(world, "first") == 2
        assert (await world.status("TrainingJob", "first"))["attempt"]["resumedFrom"]["step"] == SAVED


@asynccontextmanager
async def scheduled(world: World, installed: Installed, gpus: Mapping[str, int]) -> AsyncIterator[None]:
    """Nodes of the test's own, an operator without a view of them, and a kubelet that binds no trainer."""
    world.kubelet.runs = lambda pod: bool(pod["spec"].get("nodeName"))
    try:
        async with nodes(world, **gpus), world.operator(settings=world.settings(installed=installed)):
            await bound_claim(world)
            yield
    finally:  # a queue's share counts pods, even those of nodes that are gone
        for pod in await world.list("Pod"):
            await world.api.delete("Pod", world.namespace, pod["metadata"]["name"], gracePeriodSeconds=0)


async def bound_claim(world: World) -> None:
    """The jobs' claim with its volume, as the controller of volumes leaves them; schedulers refuse any other."""
    spec: dict[str, Any] = CLAIM["spec"]  # type: ignore[assignment]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": world.namespace},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "hostPath": {"path": "/checkpoints"},
            "claimRef": {"namespace": world.namespace, "name": "checkpoints"},
        },
    }
    bound = {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}, "name": "checkpoints"}
    await world.api.create(volume)
    await world.add({**CLAIM, "metadata": bound, "spec": {**spec, "volumeName": world.namespace}})
    await world.api.patch(
        "PersistentVolumeClaim", world.namespace, "checkpoints", {"status": {"phase": "Bound"}}, "status"
    )


async def pods(world: World, name: str) -> list[Object]:
    """The trainer pods of a job that have not ended."""
    mine = [pod for pod in await world.list("Pod") if pod["metadata"]["labels"].get("stoker.dev/job") == name]
    live = [pod for pod in mine if pod["status"].get("phase") in ("Pending", "Running")]
    return [pod for pod in live if pod["metadata"]["labels"].get("stoker.dev/role") == "trainer"]


async def bound(world: World, name: str) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in await pods(world, name))


async def in_phase(world: World, name: str, phase: str) -> None:
    async def reached() -> bool:
        return await world.phase("TrainingJob", name) == phase

    await soon(world, name, reached, f"{name} is {phase}")


async def held_back(world: World, name: str, reason: str) -> None:
    """Wait until the scheduler has refused every pod and the job says why; none has a node then."""

    async def told() -> bool:
        status, refused = await world.status("TrainingJob", name), [is_refused(pod) for pod in await pods(world, name)]
        return refused == [True, True] and status.get("phase") == "Pending" and reason in str(status.get("message"))

    await soon(world, name, told, f"{name} waits: {reason}")
    assert await bound(world, name) == 0, "no pod of a gang starts alone"


def is_refused(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(found["type"] == "PodScheduled" and found["status"] == "False" for found in conditions)


async def soon(world: World, name: str, reached: Reached, what: str) -> None:
    """Wait until it is so; a failure tells the states of the job and of its pods."""
    try:
        await eventually(reached, within_s=WITHIN_S, what=what)
    except AssertionError as error:
        message = (await world.status("TrainingJob", name)).get("message")
        states = [(pod["spec"].get("nodeName"), pod["status"]) for pod in await pods(world, name)]
        raise AssertionError(f"{error}; {message}; {states}") from error


async def suspend(world: World, name: str) -> None:
    """Suspend a run, whose pods save and end once they are asked to."""
    await world.api.patch("TrainingJob", world.namespace, name, {"spec": {"run": {"suspend": True}}})

    async def drained() -> bool:
        return any(path == "/drain" for _, path, _ in world.agents.calls)

    await soon(world, name, drained, "the run is asked to save")
    await end(world, name, Cause.INTERRUPTED, SAVED)


async def end(world: World, name: str, cause: Cause, step: int) -> None:
    """Let every pod of a job save and end; pod 0 names the save of all."""
    for pod in await pods(world, name):
        labels = pod["metadata"]["labels"]
        save = saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), step)
        saves = [save] if labels["stoker.dev/node-rank"] == "0" else []
        await world.kubelet.end(pod["metadata"]["name"], cause, step=step, saves=saves)
