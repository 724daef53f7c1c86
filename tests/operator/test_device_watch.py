"""The loop with devices of claims in view: refused lists hold nothing up, and room counts from the decision on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Forbidden, Listing
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.device_watch import DEVICE_KINDS
from stoker.operator.loop.operator import FIRST_LIST_S, Operator
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.operator.render.keys import keys_object
from testing.operator.devices import device, device_class, request, resource_slice, template
from testing.operator.fakes import FakePods, embedded, settle
from testing.operator.training_world import Run

READY = [{"type": "Ready", "status": "True"}]
NODE = "local"
"""The node that embedded pods are bound to."""
CLAIMS = {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}}


class Devices:
    """An API server with kinds of `resource.k8s.io`; watches last for ever."""

    def __init__(self, *objects: Object, refused: bool = False) -> None:
        self.objects, self.refused = objects, refused

    async def list(self, kind: str, *, keep: Callable[[Object], Object], **_: Any) -> Listing:
        if self.refused:
            raise Forbidden(f"{kind}: no")
        return Listing(tuple(keep(found) for found in self.objects if found["kind"] == kind), "1")

    async def watch(self, _kind: str, _version: str, **_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


def raw_node(name: str) -> Object:
    status = {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}, "conditions": READY}
    metadata = {"name": name, "namespace": ""}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


def job(name: str, pods: int) -> Object:
    workers = {"replicas": pods, "podTemplate": CLAIMS}
    spec = Run(workers=workers, training={"totalSteps": 5, "globalBatchSize": pods}).job["spec"]
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


@contextlib.asynccontextmanager
async def running(tmp_path: Path, devices: Devices | None) -> AsyncIterator[tuple[Any, Operator]]:
    """An operator over the embedded cluster with one node and a claim for checkpoints."""
    found = embedded(tmp_path, pods=FakePods())
    operator = Operator(
        found.cluster, Settings(workers=4, resync_interval_s=600), {"TrainingJob": reconcile_trainingjob},
        clock=found.clock, jitter=lambda: 0.5, everything=found.cluster,
    )  # fmt: skip
    if devices is not None:
        operator.watch_devices(devices)  # type: ignore[arg-type]
    loop = asyncio.ensure_future(operator.run())
    await settle()
    try:
        found.objects.create(keys_object("default", operator.settings))
        volume = {"metadata": {"name": "claim", "namespace": "default"}, "spec": {}}
        found.objects.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **volume})
        node = found.objects.create(raw_node(NODE))
        ref = Ref("Node", node["metadata"]["namespace"], NODE, node["metadata"]["uid"])
        found.objects.update_status(ref, raw_node(NODE)["status"])
        yield found, operator
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await found.kubelet.stop(0)


def message(found: Any, name: str) -> str:
    return str(found.objects.get(Key("TrainingJob", "default", name))["status"].get("message"))


def gated(found: Any, name: str) -> list[bool]:
    pods = found.objects.of_kind("Pod")
    return [
        bool(pod["spec"].get("schedulingGates")) for pod in pods if pod["metadata"]["labels"]["stoker.dev/job"] == name
    ]


def test_two_gangs_never_get_the_same_devices(tmp_path: Path) -> None:
    async def story() -> None:
        devices = Devices(
            device_class("any", "true"),
            resource_slice(NODE, [device(f"d{index}") for index in range(5)]),
            template("one", request("r", "any")),
        )
        async with running(tmp_path, devices) as (found, _):
            found.objects.create(job("first", 3))
            await found.clock.advance(5)
            assert gated(found, "first") == [False] * 3
            found.objects.create(job("second", 3))
            await found.clock.advance(5)
            assert gated(found, "second") == [True] * 3
            assert "2 of 3 pods fit on 1 nodes, devices of any: 2 free, 3 needed" in message(found, "second")

    asyncio.run(story())


@pytest.mark.parametrize("devices", [None, Devices(refused=True)], ids=["absent", "refused"])
def test_devices_that_cannot_be_seen_hold_nothing_up_and_the_job_says_so(
    tmp_path: Path, devices: Devices | None
) -> None:
    async def story() -> None:
        async with running(tmp_path, devices) as (found, operator):
            watched = {informer.kind for informer in operator.informers} & {*DEVICE_KINDS}
            assert watched == (set() if devices is None else {*DEVICE_KINDS})
            found.objects.create(job("run", 2))
            await found.clock.advance(FIRST_LIST_S + 5)
            assert operator.synced
            assert gated(found, "run") == [False] * 2
            status = found.objects.get(Key("TrainingJob", "default", "run"))["status"]
            limited = next(one for one in status["conditions"] if one["type"] == "PlacementLimited")
            assert (limited["status"], limited["reason"]) == ("True", "ResourceClaims")

    asyncio.run(story())
