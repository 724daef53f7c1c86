"""Deletion of jobs and Checkpoints: the objects that go, those that stay, and a namespace that is being deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from e2e.api.api_client import ApiRefused, Object
from e2e.api.fake_agents import SAVED_STEP
from e2e.api.garbage import collect_garbage
from e2e.api.training_story import assert_at_rest, begin, has_saved, to_the_end, trains
from e2e.api.world import Story, World, eventually

FINALIZER = "stoker.dev/checkpoint-data"


async def checkpoints(world: World) -> list[Object]:
    return await world.list("Checkpoint")


async def is_guarded(world: World) -> bool:
    return any(FINALIZER in (found["metadata"].get("finalizers") or ()) for found in await checkpoints(world))


async def has_no(world: World, kind: str) -> bool:
    return not await world.list(kind)


def test_a_deleted_job_takes_its_children_and_leaves_its_checkpoints(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world)
            await to_the_end(world)
            await running.rest()
            for kind in ("Pod", "Service"):
                assert all(child["metadata"]["ownerReferences"][0]["controller"] for child in await world.list(kind))
            await world.api.delete("TrainingJob", world.namespace, "run")
            await collect_garbage(world)
            await eventually(lambda: has_no(world, "Pod"), what="its pods are gone")
            assert await has_no(world, "Service")
            (left,) = await checkpoints(world)
            assert (left["status"]["step"], left["status"]["phase"]) == (SAVED_STEP, "Complete")
            assert not left["metadata"].get("ownerReferences")
            assert not left["metadata"].get("finalizers")
            await assert_at_rest(running)

    run(story)


def test_a_job_that_is_deleted_while_it_runs_makes_no_pod_again(run: Callable[[Story], None]) -> None:
    """Foreground deletion: the job stays with a deletionTimestamp until its dependents are gone."""

    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world)
            await eventually(lambda: trains(world), what="the job trains")
            await world.api.delete("TrainingJob", world.namespace, "run", propagationPolicy="Foreground")
            await eventually(lambda: has_no(world, "Pod"), what="its pods are gone")
            await running.rest()
            assert len(world.kubelet.created) == 2
            assert (await world.get("TrainingJob", "run"))["metadata"]["finalizers"] == ["foregroundDeletion"]
            await assert_at_rest(running)

    run(story)


def test_a_checkpoint_that_retains_its_data_goes_without_a_task(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world)
            await to_the_end(world)
            (saved,) = await checkpoints(world)
            await world.api.delete("Checkpoint", world.namespace, saved["metadata"]["name"])
            await eventually(lambda: has_no(world, "Checkpoint"), what="it is gone")
            await running.rest()
            assert await has_no(world, "Checkpoint")
            assert [name for name in world.kubelet.created.values() if "delete" in name] == []
            await assert_at_rest(running)

    run(story)


def test_a_checkpoint_that_deletes_its_data_runs_one_task_and_then_goes(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world, checkpoint__deletionPolicy="Delete")
            await to_the_end(world)
            await eventually(lambda: is_guarded(world), what="the data is guarded")
            (saved,) = await checkpoints(world)
            assert await tasks(world) == []
            await world.api.delete("Checkpoint", world.namespace, saved["metadata"]["name"])
            await eventually(lambda: has_no(world, "Checkpoint"), what="the data is deleted and the object gone")
            await running.rest()
            assert [found["stoker.dev/task"] for found in await tasks(world)] == ["delete"]
            await assert_at_rest(running)

    run(story)


def test_a_task_that_fails_keeps_the_checkpoint_and_says_why(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        def refuse(pod: Object) -> dict[str, Any]:
            return {
                "task": pod["metadata"]["labels"]["stoker.dev/task"],
                "ok": False,
                "problems": ["the folder holds foreign files"],
            }

        world.kubelet.tasks = refuse
        async with world.operator():
            await begin(world, checkpoint__deletionPolicy="Delete")
            await to_the_end(world)
            await eventually(lambda: is_guarded(world), what="the data is guarded")
            (saved,) = await checkpoints(world)
            await world.api.delete("Checkpoint", world.namespace, saved["metadata"]["name"])

            async def blocked() -> bool:
                (left,) = await checkpoints(world)
                reasons = {c["type"]: (c["status"], c["reason"]) for c in left["status"]["conditions"]}
                return reasons.get("Stalled") == ("True", "DeletionBlocked")

            await eventually(blocked, what="it says that it is blocked")
            (left,) = await checkpoints(world)
            assert left["status"]["message"] == "the delete task refused without a reason"
            await world.api.patch(
                "Checkpoint", world.namespace, saved["metadata"]["name"], {"spec": {"deletionPolicy": "Retain"}}
            )
            await eventually(lambda: has_no(world, "Checkpoint"), what="Retain lets it go at once")

    run(story)


async def tasks(world: World) -> list[dict[str, str]]:
    """Return the labels of the task pods that exist; those of a deleted Checkpoint wait for the garbage collector."""
    return [
        pod["metadata"]["labels"]
        for pod in await world.list("Pod")
        if pod["metadata"]["labels"]["stoker.dev/role"] == "task"
    ]


def test_a_job_in_a_dying_namespace_is_given_up_quietly(run: Callable[[Story], None]) -> None:
    """The operator tries a few times with growing pauses; other namespaces are not affected."""

    async def story(world: World) -> None:
        async with world.operator() as running:
            await begin(world)
            await eventually(lambda: trains(world), what="the job trains")
            await eventually(lambda: has_saved(world), what="its save is verified")
            await world.api.delete("Namespace", "", world.namespace)
            for pod in await world.list("Pod"):
                await world.api.delete("Pod", world.namespace, pod["metadata"]["name"])
            await eventually(lambda: has_no(world, "Pod"), what="its pods are gone")
            running.proxy.clear()
            await asyncio.sleep(4)
            assert running.proxy.writes < 30
            assert len(world.kubelet.created) == 2

    run(story)


def test_a_namespace_that_is_deleted_lets_go_of_a_job(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            await begin(world)
            await eventually(lambda: trains(world), what="the job trains")
            await world.api.delete("Namespace", "", world.namespace)
            await world.api.delete("TrainingJob", world.namespace, "run")

            async def gone() -> bool:
                try:
                    await world.get("TrainingJob", "run")
                except ApiRefused as refused:
                    return refused.code == 404
                return False

            await eventually(gone, what="no finalizer of ours holds it")

    run(story)
