"""The life of a training job in a test (start, training, save, end), with the assertions on its result."""

from __future__ import annotations

from collections import Counter
from typing import Any

from e2e.api.fake_agents import SAVED_STEP, saved, training
from e2e.api.world import Running, World, eventually, job
from stoker.pod.causes import Cause

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "checkpoints"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


async def begin(world: World, **spec: Any) -> None:
    """Create a claim and a job of two pods that train and have saved once."""
    await world.add(CLAIM)
    await world.add(job(**spec))


async def trains(world: World) -> bool:
    """Wait until the job is Running, then let its leader report a save."""
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
    """Report that all ranks have finished."""
    for pod in await world.list("Pod"):
        labels = pod["metadata"]["labels"]
        saves = [saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), SAVED_STEP)]
        await world.kubelet.end(pod["metadata"]["name"], Cause.COMPLETED, step=100, saves=saves)


async def to_the_end(world: World) -> None:
    """Take a job from its creation to Completed."""
    await eventually(lambda: trains(world), what="the job trains")
    await eventually(lambda: has_saved(world), what="its save is verified")
    await finish(world)

    async def completed() -> bool:
        return await world.phase("TrainingJob", "run") == "Completed"

    await eventually(completed, what="the job is Completed")


async def assert_once(world: World, attempts: int = 1) -> None:
    """Assert that each pod of each attempt was made once, and that there is one Checkpoint."""
    made = Counter(world.kubelet.created.values())
    assert sorted(made.values()) == [1] * (2 * attempts), made
    found = await world.list("Checkpoint")
    assert [(one["status"]["phase"], one["status"]["step"]) for one in found] == [("Complete", SAVED_STEP)]


async def assert_at_rest(running: Running, quiet_s: float = 0.3) -> None:
    """Assert that one more pass over everything sends no request once the operator is quiet."""
    await running.rest(quiet_s)
    running.proxy.clear()
    await running.look_again()
    assert running.proxy.quiet_calls() == []


async def assert_successor_writes_nothing(world: World) -> None:
    """Assert that an operator which starts on another's cluster only reads."""
    async with world.operator() as fresh:
        await fresh.rest()
        assert [call for call in fresh.proxy.calls if call.writes] == []
