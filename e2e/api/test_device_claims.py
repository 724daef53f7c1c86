"""Gangs whose pods claim devices, on a real API server with published slices: placed where the devices are free."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from e2e.api.api_client import ApiClient
from e2e.api.plane import Plane
from e2e.api.test_gang_placement import gang, message, nodes, pins
from e2e.api.training_story import CLAIM, assert_at_rest
from e2e.api.world import Story, World, eventually, world
from e2e.cluster.control_plane import ControlPlane
from stoker.gateway.domain.capacity import capacities, gpus_of_pod
from stoker.gateway.domain.claimed_gpus import ClaimedGpus
from stoker.operator.cluster.kinds import device_kinds
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.kube_cluster import KubeCluster
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Object
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.device_watch import DEVICE_KINDS
from stoker.operator.service.discovery import discover
from stoker.pod.control_key import new_private_key
from testing.operator.devices import claim, device, device_class, request, resource_slice, template

EXTENDED = "example.com/gpu"
"""An extended resource that devices stand for (KEP-5004)."""
HELD = {"one": 2, "two": 2, "three": 1}
"""Devices of each pod."""
KINDS = {
    "ResourceSlice": "resourceslices",
    "DeviceClass": "deviceclasses",
    "ResourceClaimTemplate": "namespaces/{}/resourceclaimtemplates",
    "ResourceClaim": "namespaces/{}/resourceclaims",
}


def path_of(world: World, found: Object, *more: str) -> str:
    return "/".join(("apis/resource.k8s.io/v1", KINDS[found["kind"]].format(world.namespace), *more))


async def publish(world: World, *found: Object) -> None:
    """Create objects as a driver, an administrator and a user do; in the test's namespace where they have one."""
    for one in found:
        metadata = {key: value for key, value in one["metadata"].items() if key in ("name", "ownerReferences")}
        await world.api.ask("POST", path_of(world, one), {**one, "metadata": metadata, "status": None})


async def allocate(world: World, found: Object) -> None:
    """Create a claim and write its devices, as the scheduler does."""
    name = found["metadata"]["name"]
    spec = {"devices": {"requests": [request("r", f"{world.namespace}-gpu", 2)]}}
    await publish(world, {**found, "spec": spec})
    path = path_of(world, found, name, "status")
    await world.api.ask("PATCH", path, {"status": found["status"]}, kind="merge-patch+json")


def test_gangs_get_nodes_with_free_devices_and_wait_while_claims_hold_them(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        class_name = f"{world.namespace}-gpu"
        model = "device.attributes['gpu.example.com'].model == 'H200'"
        first, second = f"{world.namespace}-a", f"{world.namespace}-b"
        devices = [device(f"d{index}", model="H200") for index in range(4)]
        await publish(
            world,
            device_class(class_name, "device.driver == 'gpu.example.com'"),
            resource_slice(first, [*devices[:2], device("old", model="P100")]),
            resource_slice(second, devices),
            template("two", request("r", class_name, 2, selectors=[{"cel": {"expression": model}}])),
        )
        held = claim("held", [(second, "d0"), (second, "d1")])
        template_spec = {
            "spec": {
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "two"}],
                "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
            }
        }
        workers = {"replicas": 3, "gpusPerPod": 0, "podTemplate": template_spec}
        async with nodes(world, a=0, b=0, c=0), world.operator(places_gangs=True, devices=True) as running:
            await world.add(CLAIM)
            await allocate(world, held)

            async def counted() -> bool:
                return f"devices of {class_name} where {model}: 4 free, 6 needed" in await message(world, "run")

            await world.add(gang(world, "run", workers=workers, training__globalBatchSize=3))
            await eventually(counted, what="the job names the devices that are missing: " + await message(world, "run"))
            assert "WaitingForDevices: 2 of 3 pods fit on 3 nodes" in await message(world, "run")
            assert await pins(world, "run") == [None, None, None]
            await assert_at_rest(running)
            await world.api.ask("DELETE", path_of(world, held, "held"))

            async def placed() -> bool:
                return sorted(map(str, await pins(world, "run"))) == [first, second, second]

            await eventually(placed, what="the gang is placed where the devices are free")
            conditions = {found["type"] for found in (await world.status("TrainingJob", "run"))["conditions"]}
            assert "PlacementLimited" not in conditions

    run(story)


def test_what_the_real_scheduler_allocated_is_counted_for_its_pods(tmp_path: Path) -> None:
    """Kubernetes' own controller makes the claims, its scheduler chooses the devices; no kubelet is needed for that."""
    flags = ("--node-monitor-grace-period=30m",)  # no kubelet keeps these nodes alive
    with ControlPlane(tmp_path / "plane", "devices", controllers=True, scheduler=True, controller_flags=flags) as plane:
        asyncio.run(_count_what_was_allocated(Plane(plane)))


async def _count_what_was_allocated(plane: Plane) -> None:
    clock = SystemClock()
    connection = ApiConnection(Access(str(plane.kubeconfig)), RateLimit(clock, per_second=1000, burst=2000))
    version = (await discover(connection)).devices
    cluster = KubeCluster(connection, PodHttp(new_private_key(), clock, str), more_kinds=device_kinds(version))
    spec = {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "two"}],
        "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}],
    }
    requesting = {"containers": [{"name": "main", "image": "none", "resources": {"limits": {EXTENDED: "1"}}}]}
    try:
        async with ApiClient(plane.access) as api, world(plane, "idle", plane.control_plane.folder) as idle:
            found = replace(idle, namespace="devices")  # in which no fake kubelet binds pods
            await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "devices"}})
            devices = [device(f"d{index}") for index in range(5)]
            await publish(
                found,
                device_class("gpu", "device.driver == 'gpu.example.com'", extended=EXTENDED),
                resource_slice("devices-a", devices[:3]),
                resource_slice("devices-b", devices),
                template("two", request("r", "gpu", 2)),
            )
            async with nodes(found, a=0, b=0):
                for name, body in (("one", spec), ("two", spec), ("three", requesting)):
                    metadata = {"name": name, "namespace": "devices"}
                    await api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body})

                async def bound() -> bool:
                    return all(pod["spec"].get("nodeName") for pod in await api.list("Pod", "devices"))

                await eventually(bound, what="the scheduler bound all pods")
                watch = CapacityWatch(lambda: None)
                watch.devices.seen = lambda: True
                for kind in ("Node", "Pod"):
                    for item in (await cluster.list(kind, keep=watch.pruned)).items:
                        watch.put(item)
                for kind in DEVICE_KINDS:
                    for item in (await cluster.list(kind, keep=watch.devices.pruned)).items:
                        watch.devices.put(item)
                pods = await api.list("Pod", "devices")
                for pod in pods:
                    held = watch.devices.allocated_to(pod["metadata"]["uid"])
                    count = HELD[pod["metadata"]["name"]]
                    assert [len(claim.devices) for claim in held.values()] == [count]
                need = watch.needs("devices", spec)
                left = {one.name: one.free["devices of gpu"] for one in watch.nodes() if one.name.startswith("devices")}
                used: Counter[str] = Counter()
                for pod in pods:
                    used[pod["spec"]["nodeName"]] += HELD[pod["metadata"]["name"]]
                assert left == {"devices-a": 3 - used["devices-a"], "devices-b": 5 - used["devices-b"]}
                assert {one.name: one.free[EXTENDED] for one in watch.nodes() if one.name.startswith("devices")} == left
                assert need == {"devices of gpu": 2}
                slices, claims = [(await cluster.list(kind)).items for kind in ("ResourceSlice", "ResourceClaim")]
                claimed = ClaimedGpus(slices, claims)  # as the gateway and `stoker top` count
                claiming = [pod for pod in pods if pod["metadata"]["name"] != "three"]  # it asks for no GPU by name
                assert [gpus_of_pod(pod, claimed) for pod in claiming] == [2, 2]
                nodes_now = (await cluster.list("Node")).items
                gpus = {one.name: one.available_gpus for one in capacities(nodes_now, pods, claimed) if one.gpus}
                assert gpus == left
    finally:
        await cluster.close()
