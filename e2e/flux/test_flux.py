"""Jobs and deployments under Flux's own controller: apply, prune, replace, force, drift, order, health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from e2e.api.api_client import Object
from e2e.api.fake_agents import SAVED_STEP
from e2e.api.garbage import collect_garbage
from e2e.api.training_story import CLAIM, assert_at_rest, finish, has_saved, to_the_end, trains
from e2e.api.world import Running, Story, World, eventually, job
from e2e.flux.published import Flux, flux
from stoker.pod.causes import Cause
from testing.operator.bad_manifests import DEPLOYMENT, changed

pytestmark = pytest.mark.usefixtures("with_flux")

FLUX, OURS = "kustomize-controller", "stoker-operator"
FluxStory = Callable[[World, Flux, Running], Awaitable[None]]


@pytest.fixture
def under_flux(run: Callable[[Story], None]) -> Callable[[FluxStory], None]:
    """A function that runs a story with an operator and a source for Flux, in a namespace with a claim."""

    async def whole(world: World, story: FluxStory) -> None:
        async with flux(world) as tool, world.operator() as running:
            await world.add(CLAIM)
            await story(world, tool, running)

    def start(story: FluxStory) -> None:
        async def inside(world: World) -> None:
            await whole(world, story)

        run(inside)

    return start


def deployment() -> Object:
    """A deployment of what the job makes."""
    model = {"checkpointSelector": {"jobRef": {"name": "run"}}}
    return changed(DEPLOYMENT, {"metadata.name": "chat", "spec.model": model})


async def uid(world: World) -> str:
    return str((await world.get("TrainingJob", "run"))["metadata"]["uid"])


async def exists(world: World, kind: str) -> bool:
    return bool(await world.list(kind))


async def in_phase(world: World, phase: str) -> None:
    async def reached() -> bool:
        return bool(await world.list("TrainingJob")) and await world.phase("TrainingJob", "run") == phase

    await eventually(reached, within_s=120, what=f"the job is {phase}")


async def trains_and_has_saved(world: World) -> None:
    async def running() -> bool:
        return await exists(world, "TrainingJob") and await trains(world)

    await eventually(running, within_s=120, what="the job trains")
    await eventually(lambda: has_saved(world), within_s=120, what="its save is verified")


async def gone(world: World, old: str) -> None:
    async def reached() -> bool:
        return old not in {found["metadata"]["uid"] for found in await world.list("TrainingJob")}

    await eventually(reached, within_s=120, what="the old job is gone")


def managers(found: Object, subresource: str = "") -> set[str]:
    entries = found["metadata"]["managedFields"]
    return {entry["manager"] for entry in entries if entry.get("subresource", "") == subresource}


def test_a_deployment_that_depends_on_a_job_is_applied_once_the_job_completed(
    under_flux: Callable[[FluxStory], None],
) -> None:
    async def story(world: World, tool: Flux, running: Running) -> None:
        trained, served = await tool.publish("train", job()), await tool.publish("serve", deployment())
        await tool.follow("train")
        await tool.follow("serve", dependsOn=[{"name": "train"}])
        await trains_and_has_saved(world)
        await tool.says("serve", "Ready", "DependencyNotReady")
        await tool.says("train", "Healthy", "Running health checks")
        assert not await exists(world, "InferenceDeployment")

        await to_the_end(world)
        await tool.is_ready("train", trained)
        await tool.is_ready("serve", served)
        assert (await world.status("InferenceDeployment", "chat"))["phase"] == "Serving"
        assert await tool.inventory("train") == [f"{world.namespace}_run_stoker.dev_TrainingJob"]
        for kind, name in (("TrainingJob", "run"), ("InferenceDeployment", "chat")):
            found = await world.get(kind, name)
            assert (managers(found), managers(found, "status")) == ({FLUX}, {OURS})
            assert found["metadata"]["generation"] == 1
        for kind in ("Pod", "Service", "ConfigMap", "Checkpoint", "EnginePool"):
            for child in await world.list(kind):
                assert not any("fluxcd" in label for label in child["metadata"].get("labels", {})), child["metadata"]
        await assert_at_rest(running)

    under_flux(story)


def test_a_drift_is_taken_back_and_no_pod_is_touched(under_flux: Callable[[FluxStory], None]) -> None:
    async def story(world: World, tool: Flux, running: Running) -> None:
        await tool.publish("train", job(checkpoint__maxToKeep=3))
        await tool.follow("train", wait=False)
        await trains_and_has_saved(world)
        await running.rest()
        before = await world.get("TrainingJob", "run")

        edit = {"spec": {"checkpoint": {"maxToKeep": 1}}, "metadata": {"labels": {"team": "research"}}}
        await world.api.patch("TrainingJob", world.namespace, "run", edit)

        async def repaired() -> bool:
            found = await world.get("TrainingJob", "run")
            return found["metadata"]["generation"] == 3 and found["status"]["observedGeneration"] == 3

        await eventually(repaired, within_s=120, what="Git's value is back")
        after = await world.get("TrainingJob", "run")
        assert after["spec"] == before["spec"]
        assert after["metadata"]["labels"]["team"] == "research", "what Git does not name is no drift"
        assert len(world.kubelet.created) == 2
        assert after["status"]["attempt"]["number"] == before["status"]["attempt"]["number"] == 0

        old = after["metadata"]["uid"]
        await world.api.delete("TrainingJob", world.namespace, "run")
        await gone(world, old)
        await collect_garbage(world)
        await trains_and_has_saved(world)
        assert await uid(world) != old

    under_flux(story)


def test_a_pruned_job_leaves_its_checkpoints_and_its_name_can_be_used_again(
    under_flux: Callable[[FluxStory], None],
) -> None:
    async def story(world: World, tool: Flux, running: Running) -> None:
        other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}, "data": {}}
        await tool.publish("train", job(), other)
        await tool.follow("train")
        await to_the_end_from_git(world)
        old = await uid(world)

        without = await tool.publish("train", other)
        await gone(world, old)
        await collect_garbage(world)
        await tool.is_ready("train", without)
        assert await tool.inventory("train") == [f"{world.namespace}_other__ConfigMap"]
        assert [found["status"]["step"] for found in await world.list("Checkpoint")] == [SAVED_STEP]

        again = await tool.publish("train", job(), other)
        await to_the_end_from_git(world)
        await tool.is_ready("train", again)
        found = await world.get("TrainingJob", "run")
        assert found["metadata"]["uid"] != old
        assert found["status"]["attempt"]["number"] == 0
        assert not found["status"]["attempt"].get("resumedFrom"), "a new job begins at its beginning"
        assert len(await world.list("Checkpoint")) == 2, "one of the old job, one of the new"
        await assert_at_rest(running)

    under_flux(story)


async def to_the_end_from_git(world: World) -> None:
    await trains_and_has_saved(world)
    await finish(world)
    await in_phase(world, "Completed")


def test_what_is_fixed_is_refused_and_replaced_by_force(under_flux: Callable[[FluxStory], None]) -> None:
    async def story(world: World, tool: Flux, running: Running) -> None:
        await tool.publish("train", job())
        await tool.follow("train", wait=False)
        await trains_and_has_saved(world)
        old = await uid(world)

        longer = job(training__totalSteps=200)
        await tool.publish("train", longer)
        await tool.says("train", "Ready", "training is fixed: make a new TrainingJob")
        assert await uid(world) == old
        assert await world.phase("TrainingJob", "run") == "Running"

        forced = changed(longer, {"metadata.annotations": {"kustomize.toolkit.fluxcd.io/force": "enabled"}})
        revision = await tool.publish("train", forced)
        await gone(world, old)
        await collect_garbage(world)
        await trains_and_has_saved(world)
        await tool.is_ready("train", revision)
        replaced = await world.get("TrainingJob", "run")
        assert replaced["metadata"]["uid"] != old
        assert replaced["spec"]["training"]["totalSteps"] == 200
        assert replaced["status"]["attempt"]["number"] == 0

    under_flux(story)


def test_a_mistake_in_git_stops_no_job_unless_it_is_forced(under_flux: Callable[[FluxStory], None]) -> None:
    """Flux takes every value that the API server refuses for a change of a fixed field."""

    async def story(world: World, tool: Flux, running: Running) -> None:
        await tool.publish("train", job())
        await tool.follow("train", wait=False)
        await trains_and_has_saved(world)
        old = await uid(world)
        mistake = job(run={"backoffLimit": -1})
        await tool.publish("train", mistake)
        await tool.says("train", "Ready", "spec.run.backoffLimit")
        assert (await uid(world), await world.phase("TrainingJob", "run")) == (old, "Running")

        await tool.follow("train", wait=False, force=True)
        await gone(world, old)
        assert len(await world.list("Checkpoint")) == 1, "its checkpoints stay"

    under_flux(story)


def test_health_follows_a_suspended_and_a_failed_job(under_flux: Callable[[FluxStory], None]) -> None:
    async def story(world: World, tool: Flux, running: Running) -> None:
        world.kubelet.last_saves = lambda pod: []
        await tool.publish("train", job(run={"backoffLimit": 0}))
        await tool.follow("train")
        await trains_and_has_saved(world)
        await tool.says("train", "Healthy", "Running health checks")

        resting = await tool.publish("train", job(run={"backoffLimit": 0, "suspend": True}))
        await eventually(lambda: drained(world), within_s=120, what="the run is asked to save")
        for pod in await world.list("Pod"):
            await world.kubelet.end(pod["metadata"]["name"], Cause.INTERRUPTED, step=SAVED_STEP)
        await in_phase(world, "Suspended")
        await tool.is_ready("train", resting)

        await tool.publish("train", job(run={"backoffLimit": 0}))
        await in_phase(world, "Running")
        for pod in await world.list("Pod"):
            if pod["status"]["phase"] == "Running":
                await world.kubelet.end(pod["metadata"]["name"], Cause.DATA_ERROR)
        await in_phase(world, "Failed")
        await tool.says("train", "Ready", "HealthCheckFailed")
        assert "TrainingJob" in (await tool.conditions("train"))["Ready"]["message"]

    under_flux(story)


async def drained(world: World) -> bool:
    return any(path == "/drain" for _, path, _ in world.agents.calls)
