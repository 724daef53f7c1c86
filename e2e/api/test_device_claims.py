"""Gangs whose pods claim devices, on a real API server with published slices: placed where the devices are free."""

from __future__ import annotations

from collections.abc import Callable

from e2e.api.test_gang_placement import gang, message, nodes, pins
from e2e.api.training_story import CLAIM, assert_at_rest
from e2e.api.world import Story, World, eventually
from stoker.operator.domain.plan import Object
from testing.operator.devices import claim, device, device_class, request, resource_slice, template

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
