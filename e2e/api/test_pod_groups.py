"""Gangs for other schedulers on a real API server: Volcano by its definition, Kubernetes by its own PodGroup.

Kubernetes' own scheduler takes them, too; Volcano's runs in `e2e/volcano`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from e2e.api.api_client import Object
from e2e.api.plane import Plane
from e2e.api.training_story import CLAIM
from e2e.api.two_gangs import take_turns
from e2e.api.whole_replicas import start_whole
from e2e.api.world import Story, World, eventually, job, world
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.schedulers import Installed
from stoker.operator.service.discovery import discover

CRDS = Path(__file__).parents[2] / "crds"
VOLCANO = "scheduling.volcano.sh"


def pod_group_definition() -> Object:
    """Volcano's PodGroup, as strict as a definition can be about the fields that the operator writes."""
    spec = {
        "type": "object",
        "required": ["minMember"],
        "properties": {
            "minMember": {"type": "integer", "minimum": 1},
            "queue": {"type": "string"},
            "priorityClassName": {"type": "string"},
        },
    }
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    names = {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup", "listKind": "PodGroupList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{VOLCANO}"},
        "spec": {"group": VOLCANO, "scope": "Namespaced", "names": names, "versions": [version]},
    }


async def found_by(plane: Plane) -> Installed:
    """What the operator finds by asking this API server."""
    connection = ApiConnection(Access(str(plane.kubeconfig)), RateLimit(SystemClock(), per_second=100, burst=100))
    try:
        return await discover(connection)
    finally:
        await connection.close()


async def gang_of(world: World, api: str, installed: Installed, **spec: Any) -> tuple[Object, list[Object]]:
    """The PodGroup that the operator makes for a job, and the job's pods."""
    async with world.operator(settings=world.settings(installed=installed)) as running:
        await world.add(CLAIM)
        await world.add(job("run", **spec))

        async def made() -> bool:
            return len([pod for pod in await world.list("Pod") if "-a0-" in pod["metadata"]["name"]]) == 2

        await eventually(made, what=str(await world.status("TrainingJob", "run")))
        await running.rest()
        answer = await world.api.ask("GET", f"apis/{api}/namespaces/{world.namespace}/podgroups")
        (group,) = answer["items"]
        return group, await world.list("Pod")


def test_volcano_takes_the_group_and_its_pods_name_it(plane: Plane, run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        definition = pod_group_definition()
        await world.api.create(definition)
        try:

            async def served() -> bool:
                return (await found_by(world.plane)).volcano

            await eventually(served, what="the API server serves Volcano's group")
            world.kubelet.runs = lambda pod: False
            group, pods = await gang_of(
                world,
                f"{VOLCANO}/v1beta1",
                await found_by(world.plane),
                scheduling={"backend": "volcano", "queueName": "team"},
            )
            assert group["spec"] == {"minMember": 2, "queue": "team"}, "nothing was pruned"
            for pod in pods:
                assert pod["spec"]["schedulerName"] == "volcano"
                assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
        finally:
            await world.api.delete("CustomResourceDefinition", "", definition["metadata"]["name"])

    run(story)


@asynccontextmanager
async def with_own_groups(folder: Path) -> AsyncIterator[World]:
    """A world on an API server with Kubernetes' own PodGroup, which is alpha, and the scheduler that knows it."""
    gates = "--feature-gates=GenericWorkload=true,GangScheduling=true"
    control_plane = ControlPlane(
        folder / "plane",
        "pod-groups",
        scheduler=True,
        api_server_flags=("--runtime-config=scheduling.k8s.io/v1alpha2=true", gates),
        scheduler_flags=(gates,),
    )
    await asyncio.to_thread(control_plane.start)
    try:
        plane = Plane(control_plane)
        await asyncio.to_thread(plane.kubectl, "apply", "--server-side", "-f", str(CRDS))
        await asyncio.to_thread(wait_until_established, plane.kubectl, "-f", str(CRDS))
        async with world(plane, "own-groups", folder) as found:
            yield found
    finally:
        await asyncio.to_thread(control_plane.stop)


def test_kubernetes_own_group_is_found_and_taken_where_no_node_is_seen(tmp_path: Path) -> None:
    async def story() -> None:
        async with with_own_groups(tmp_path) as found:
            installed = await found_by(found.plane)
            assert installed.pod_groups == "scheduling.k8s.io/v1alpha2"
            found.kubelet.runs = lambda pod: False
            group, pods = await gang_of(found, installed.pod_groups, installed)
            assert group["spec"]["schedulingPolicy"]["gang"] == {"minCount": 2}
            for pod in pods:
                assert pod["spec"]["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}

    asyncio.run(story())


def test_kubernetes_own_scheduler_starts_whole_gangs_one_after_the_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with with_own_groups(tmp_path) as found:
            reason = "WaitingForGPUs: 2 of 2 nodes lack nvidia.com/gpu"
            await take_turns(found, await found_by(found.plane), "kubernetes", reason, {})

    asyncio.run(story())


def test_kubernetes_own_scheduler_starts_whole_replicas(tmp_path: Path) -> None:
    async def story() -> None:
        async with with_own_groups(tmp_path) as found:
            installed, reason = await found_by(found.plane), "waits for kubernetes: .*WaitingForGPUs"
            await start_whole(found, installed, installed.pod_groups, reason, {"backend": "auto"})

    asyncio.run(story())
