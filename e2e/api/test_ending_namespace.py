"""A namespace that is being deleted: data stays, finalizers go, and no object of the product blocks the deletion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from e2e.api.training_story import begin, finish, has_saved, trains
from e2e.api.world import Story, World, eventually

FINALIZER = "stoker.dev/checkpoint-data"


async def the_checkpoint(world: World) -> dict[str, Any] | None:
    found = await world.list("Checkpoint")
    return found[0] if found else None


def test_a_checkpoint_that_would_delete_its_data_keeps_it_and_goes(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            await begin(world, checkpoint__deletionPolicy="Delete")
            await eventually(lambda: trains(world), what="the job trains")
            await eventually(lambda: has_saved(world), what="its save is verified")
            await finish(world)

            async def guarded() -> bool:
                found = await the_checkpoint(world)
                return found is not None and found["metadata"].get("finalizers") == [FINALIZER]

            await eventually(guarded, what="the data is guarded")
            world.plane.kubectl("delete", "namespace", world.namespace, "--wait=false")
            # without a namespace controller a test deletes what the namespace holds
            world.plane.kubectl("delete", "tj,ckpt", "--all", "-n", world.namespace, "--wait=false")

            async def gone() -> bool:
                return await the_checkpoint(world) is None

            await eventually(gone, what="the finalizer goes")
            tasks = [pod for pod in await world.list("Pod") if pod["metadata"]["labels"]["stoker.dev/role"] == "task"]
            assert tasks == []

    run(story)
