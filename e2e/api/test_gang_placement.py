"""Gangs that get their nodes on a real API server: what it lets a gated pod change, and what holds two jobs apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from e2e.api.api_client import Object
from e2e.api.garbage import collect_garbage
from e2e.api.training_story import CLAIM, assert_at_rest
from e2e.api.world import Story, World, eventually, job
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.pod.causes import Cause

GPU = "nvidia.com/gpu"
RACK = "example.com/rack"


@asynccontextmanager
async def nodes(world: World, **gpus: int) -> AsyncIterator[None]:
    """Nodes of this test alone, by a label with its namespace; each is in a rack of its own."""
    names = {f"{world.namespace}-{name}": count for name, count in gpus.items()}
    for name, count in names.items():
        labels = {"test": world.namespace, RACK: name}
        await world.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        amounts = {GPU: str(count), "cpu": "64", "memory": "512Gi", "pods": "110"}
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
        }
        await world.api.ask("PATCH", f"api/v1/nodes/{name}/status", {"status": status}, kind="merge-patch+json")
        untainted = {"spec": {"taints": None}}  # admission taints new nodes as not ready, and no controller runs here
        await world.api.ask("PATCH", f"api/v1/nodes/{name}", untainted, kind="merge-patch+json")
    try:
        yield
    finally:
        for name in names:
            await world.api.ask("DELETE", f"api/v1/nodes/{name}")


def gang(world: World, name: str, **spec: Any) -> Object:
    """A job of two pods with two GPUs each, for the test's own nodes."""
    workers = {"replicas": 2, "gpusPerPod": 2, "ranksPerPod": 1, "nodeSelector": {"test": world.namespace}}
    return job(name, **{"workers": {**workers, **spec.pop("workers", {})}, "runtime": {"device": "cpu"}, **spec})


async def message(world: World, name: str) -> str:
    return str((await world.status("TrainingJob", name)).get("message"))


async def pins(world: World, name: str) -> list[str | None]:
    pods = await world.list("Pod")
    return [pinned_node(pod) for pod in pods if pod["metadata"]["labels"].get("stoker.dev/job") == name]


def test_two_gangs_share_nodes_one_after_the_other(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with nodes(world, a=2, b=2), world.operator(places_gangs=True) as running:
            await world.add(CLAIM)
            await world.add(gang(world, "first"))

            async def first_runs() -> bool:
                return await world.phase("TrainingJob", "first") == "Running"

            await eventually(first_runs, what="the first job runs: " + await message(world, "first"))
            assert sorted(map(str, await pins(world, "first"))) == [f"{world.namespace}-a", f"{world.namespace}-b"]
            await world.add(gang(world, "second"))

            async def second_waits() -> bool:
                return "WaitingForGPUs: 0 of 2 pods fit on 2 nodes" in await message(world, "second")

            await eventually(second_waits, what="the second job names what is missing")
            assert await pins(world, "second") == [None, None]
            await assert_at_rest(running)
            for pod in await world.list("Pod"):
                if pod["metadata"]["labels"]["stoker.dev/job"] == "first":
                    await world.kubelet.end(pod["metadata"]["name"], Cause.COMPLETED, step=100)

            async def second_runs() -> bool:
                return await world.phase("TrainingJob", "second") == "Running"

            await eventually(second_runs, what="the second job gets the room of the first")

    run(story)


def test_the_server_takes_a_node_when_the_users_own_gates_are_gone(
    run: Callable[[Story], None],
) -> None:
    term = {"matchExpressions": [{"key": RACK, "operator": "Exists"}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, term]}}}
    template = {"spec": {"affinity": affinity, "schedulingGates": [{"name": "example.com/own"}]}}

    async def story(world: World) -> None:
        async with nodes(world, a=2, b=4), world.operator(places_gangs=True) as running:
            await world.add(CLAIM)
            levels = [{"key": RACK}, {"key": RACK + "-none"}, {"key": RACK, "mode": "Required"}]
            body = gang(world, "run", workers={"podTemplate": template}, scheduling={"topology": levels})
            await world.add(body)

            async def held() -> bool:
                return (await message(world, "run")).endswith("gates are gone: example.com/own")

            await eventually(held, what="the job names the gates that are not the operator's")
            for pod in await world.list("Pod"):
                body = {"spec": {"schedulingGates": [{"name": "stoker.dev/placement"}]}}
                path = f"api/v1/namespaces/{world.namespace}/pods/{pod['metadata']['name']}"
                await world.api.ask("PATCH", path, body, kind="merge-patch+json")

            async def placed() -> bool:
                return set(await pins(world, "run")) == {f"{world.namespace}-b"}

            await eventually(placed, what="both pods are placed in one rack")
            await running.rest()
            for pod in await world.list("Pod"):
                assert not pod["spec"].get("schedulingGates")
                required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                assert [found["matchExpressions"] for found in required["nodeSelectorTerms"]] == [
                    term["matchExpressions"]
                ] * 2
            await assert_at_rest(running)

    run(story)


def test_a_gang_that_waits_takes_edits_at_once_and_no_foreign_pod(run: Callable[[Story], None]) -> None:
    """A user lowers what does not fit, looks around in a copy of a pod, and gives the name to a new job at once."""

    async def story(world: World) -> None:
        async with nodes(world, a=2), world.operator(places_gangs=True) as running:
            await world.add(CLAIM)
            await world.add(gang(world, "run"))

            async def waits() -> bool:
                return "WaitingForGPUs: 1 of 2 pods fit on 1 nodes" in await message(world, "run")

            await eventually(waits, what="the job names what is missing")
            await world.api.create(copy_of(await world.list("Pod"), "debug"))
            edit = {"spec": {"workers": {"replicas": 1}}}
            await world.api.ask("PATCH", path_of(world, "trainingjobs", "run"), edit, kind="merge-patch+json")

            async def runs() -> bool:
                return await world.phase("TrainingJob", "run") == "Running"

            await eventually(runs, what="one pod runs")
            status = await world.status("TrainingJob", "run")
            assert (status["attempt"]["number"], status.get("failuresWithoutProgress", 0)) == (1, 0)
            assert status["pods"]["desired"] == 1
            assert not world.kubelet.made("list"), "nothing had run, so no task looks for saves"
            await assert_at_rest(running)
            await world.api.delete("TrainingJob", world.namespace, "run")
            await world.add(gang(world, "run", workers={"replicas": 1}))
            await collect_garbage(world)
            await eventually(runs, what="a new job of the same name runs")
            assert "debug" in {pod["metadata"]["name"] for pod in await world.list("Pod")}
            await assert_at_rest(running)

    run(story)


def copy_of(pods: list[Object], name: str) -> Object:
    """The first pod under another name, as `kubectl get -o yaml`, an edit and `kubectl apply` make it."""
    found = pods[0]
    metadata = {"name": name, "namespace": found["metadata"]["namespace"], "labels": found["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": found["spec"]}


def path_of(world: World, plural: str, name: str) -> str:
    return f"apis/stoker.dev/v1alpha1/namespaces/{world.namespace}/{plural}/{name}"
