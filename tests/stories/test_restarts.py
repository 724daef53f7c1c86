"""Restarts that jobs survive: of the operator, of the supervisor, of the whole cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.folders import StateFolders, short_folders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.machine import machine_capacity
from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.pod_environment import node_environment
from stoker.operator.cluster.local.probes import ask_http
from stoker.operator.cluster.local.process import ShimRunner
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator
from stoker.operator.service.local.kubelet import Kubelet
from stoker.operator.service.reconcilers import RECONCILERS
from stoker.pod.control_key import new_private_key, public_key
from testing.stories.manifests import claim, corpus, job
from testing.stories.story_cluster import StoryCluster
from testing.stories.waits import TIMEOUT_S, phase

LONG = {"training.totalSteps": 100_000, "checkpoint.intervalSteps": 25}
JOB = Key("TrainingJob", "default", "long")


class Machine:
    """An object store and a kubelet that stay, and an operator that comes and goes."""

    def __init__(self, folders: StateFolders, names: Reservations) -> None:
        self.key = new_private_key()
        clock, addresses = SystemClock(), Addresses("loopback", names.take)
        admission = Admission(definition(info) for info in KIND_INFOS)
        self.objects = ObjectStore(now=clock.now, new_uid=lambda: str(uuid4()), admit=admission.admit)
        self.pods = PodHttp(self.key, clock, lambda: uuid4().hex)
        self.cluster = LocalCluster(self.objects, addresses, self.pods, clock)
        self.node = Node(
            objects=self.objects,
            runner=ShimRunner(),
            ask=ask_http,
            addresses=addresses,
            folders=folders,
            clock=clock,
            gpus=Gpus(()),
            capacity=machine_capacity(),
            environment=node_environment(os.environ),
            python=sys.executable,
        )
        self.kubelet = Kubelet(self.node)

    @asynccontextmanager
    async def operator(self, version: str) -> AsyncIterator[Operator]:
        """Start an operator of another version, with other images, whose only state is the cluster."""
        settings = Settings(
            operator_version=version,
            runtime_image=f"runtime:{version}",
            control_image=f"control:{version}",
            control_public_keys={"control.pem": public_key(self.key).decode()},
            poll_interval_s=0.3,
        )
        found = Operator(self.cluster, settings, RECONCILERS)
        running = asyncio.create_task(found.run())
        try:
            yield found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def until(self, holds: Callable[[Object], Any], timeout_s: float = TIMEOUT_S) -> Object:
        """Wait until `holds` is true of the job's status and return the job."""
        async with asyncio.timeout(timeout_s):
            while not holds(self.objects.get(JOB).get("status") or {}):
                await asyncio.sleep(0.05)
        return dict(self.objects.get(JOB)["status"])

    async def end(self) -> None:
        await self.kubelet.stop(3)
        await self.pods.close()


def test_an_operator_that_is_replaced_by_a_newer_one_restarts_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def story() -> None:
        StateFolders(tmp_path).make()
        with Reservations() as names, short_folders(tmp_path) as folders:
            await replace_operator(Machine(folders, names))

    async def replace_operator(machine: Machine) -> None:
        machine.kubelet.start()
        try:
            for manifest in (corpus(), claim("checkpoints"), claim("logs"), job("long", LONG)):
                machine.objects.apply({**manifest, "metadata": {**manifest["metadata"], "namespace": "default"}}, "us")
            async with machine.operator("1"):
                await machine.until(lambda status: newest(status) >= 25)
            before = machine.objects.get(JOB)["status"]
            pod = machine.objects.of_kind("Pod")[0]
            await asyncio.sleep(1)
            assert machine.objects.get(JOB)["status"] == before, "no status is written while no operator runs"

            async with machine.operator("2"):
                after = await machine.until(lambda status: newest(status) > newest(before) + 25)
                (same,) = machine.objects.of_kind("Pod")
                assert rendered(same) == rendered(pod)
                assert (after["attempt"]["number"], after["restarts"]) == (0, 0)
                assert after["pinned"]["images"] == {"trainer": "runtime:1"}
                ref = Ref(*JOB, machine.objects.get(JOB)["metadata"]["uid"])
                machine.objects.patch(ref, {"spec": {"run": {"cancel": True}}})
                await machine.until(lambda status: status["phase"] == "Cancelled")
        finally:
            await machine.end()
        assert all(phase(pod) in ("Succeeded", "Failed") for pod in machine.objects.of_kind("Pod"))

    asyncio.run(story())


def test_a_killed_supervisor_takes_its_pods_along_and_the_next_one_goes_on_from_the_newest_save(
    cluster: StoryCluster,
) -> None:
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), job("long", LONG))
    cluster.wait("TrainingJob", "long", lambda found: newest(found.get("status") or {}) >= 25, "saved")

    cluster.kill()
    cluster.wait_until_nothing_runs()

    cluster.start()
    killed = cluster.wait("TrainingJob", "long", lambda found: attempt(found) == 1, "in its second attempt")["status"]
    assert killed["attempts"][0]["failure"]["cause"] == "RankKilled"
    assert (killed["failuresWithoutProgress"], killed["attempts"][0]["failure"]["action"]) == (0, "RetryFree")
    assert killed["attempt"]["resumedFrom"]["step"] >= 25
    resumed = killed["attempt"]["resumedFrom"]["step"]
    cluster.wait("TrainingJob", "long", lambda found: newest(found["status"]) > resumed, "further")

    cluster.stop()
    assert cluster.remains() == []
    cluster.start()
    last = cluster.wait("TrainingJob", "long", lambda found: attempt(found) == 2, "in its third attempt")["status"]
    saved = last["attempt"]["resumedFrom"]["step"]
    assert (last["attempts"][0]["failure"]["cause"], last["attempts"][0]["lastStep"]) == ("Interrupted", saved)
    assert saved > resumed


def rendered(pod: Object) -> Object:
    """What an operator writes of a pod. Its status is the kubelet's, which may find it not ready on a busy machine."""
    metadata = {name: value for name, value in pod["metadata"].items() if name != "resourceVersion"}
    return {"metadata": metadata, "spec": pod["spec"]}


def newest(status: Object) -> int:
    return int((status.get("newestVerifiedCheckpoint") or {}).get("step", 0))


def attempt(found: Object) -> int:
    return int(((found.get("status") or {}).get("attempt") or {}).get("number", 0))
