"""A quota of Kueue in a test's namespace, and jobs that share it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from e2e.api.api_client import Object
from e2e.api.fake_agents import TOTAL_STEPS, saved
from e2e.api.plane import Plane
from e2e.api.world import Reached, World, eventually, job
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.schedulers import Installed
from stoker.operator.service.discovery import discover
from stoker.pod.causes import Cause

GROUP = "kueue.x-k8s.io/pod-group-name"


async def open_queue(plane: Plane, world: World, cpus: int = 2) -> None:
    """Make a quota, its queue in the test's namespace, and two priorities; or change the quota."""
    for body in queue(world.namespace, {"cpu": str(cpus), "memory": "1Ti"}):
        await asyncio.to_thread(plane.kubectl, "apply", "-f", "-", stdin=body)


def queue(name: str, quota: Mapping[str, str]) -> list[Object]:
    """A quota for a namespace, its queue `team` there, and the priorities `<name>-low` and `<name>-high`."""
    api = "kueue.x-k8s.io/v1beta1"
    flavor = {"name": name, "resources": [{"name": kind, "nominalQuota": most} for kind, most in quota.items()]}
    group = {"coveredResources": list(quota), "flavors": [flavor]}
    cluster_queue = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    priorities = [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{name}-{kind}"},
            "value": value,
        }
        for kind, value in (("low", 10), ("high", 1000))
    ]
    local = {"name": "team", "namespace": name}
    return [
        *priorities,
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": {}},
        {"apiVersion": api, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": cluster_queue},
        {"apiVersion": api, "kind": "LocalQueue", "metadata": local, "spec": {"clusterQueue": name}},
    ]


def gang(world: World, name: str, priority: str) -> Object:
    """A job of two pods with one CPU each, for Kueue."""
    resources = {"requests": {"cpu": "1", "memory": "64Mi"}}
    workers = {"replicas": 2, "resources": resources, "priorityClassName": f"{world.namespace}-{priority}"}
    return job(name, workers=workers, scheduling={"backend": "kueue", "queueName": "team"})


async def installed(plane: Plane) -> Installed:
    """What the operator finds by asking the API server."""
    clock = SystemClock()
    connection = ApiConnection(Access(str(plane.kubeconfig)), RateLimit(clock, per_second=100, burst=100))
    try:
        return await discover(connection)
    finally:
        await connection.close()


async def status(world: World, name: str) -> Object:
    return await world.status("TrainingJob", name)


async def pods(world: World, name: str) -> list[Object]:
    """The trainer pods of a job that have not ended."""
    found = await world.list("Pod")
    mine = [pod for pod in found if pod["metadata"]["labels"].get("stoker.dev/job") == name]
    return [pod for pod in mine if pod["status"]["phase"] in ("Pending", "Running")]


def gated(found: list[Object]) -> bool:
    gates = [[gate["name"] for gate in pod["spec"].get("schedulingGates") or ()] for pod in found]
    return len(found) == 2 and all("kueue.x-k8s.io/admission" in each for each in gates)


async def in_phase(world: World, name: str, phase: str) -> None:
    async def reached() -> bool:
        return bool((await status(world, name)).get("phase") == phase)

    await soon(world, name, reached, phase)


async def waits_in_the_queue(world: World, name: str) -> None:
    async def waits() -> bool:
        found = await status(world, name)
        return gated(await pods(world, name)) and found.get("message") == "the gang waits for kueue, queue team"

    await soon(world, name, waits, "in Kueue's queue")


async def soon(world: World, name: str, reached: Reached, what: str) -> None:
    try:
        await eventually(reached, within_s=120, what=f"{name} is {what}")
    except AssertionError as error:
        found = [
            (pod["metadata"], pod["spec"].get("schedulingGates"), pod["status"]) for pod in await pods(world, name)
        ]
        raise AssertionError(f"{error}; {await status(world, name)}; {found}") from error


async def end(world: World, name: str) -> None:
    """Let every pod of a job finish."""
    for pod in await pods(world, name):
        labels = pod["metadata"]["labels"]
        saves = [saved(labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"]), TOTAL_STEPS)]
        await world.kubelet.end(pod["metadata"]["name"], Cause.COMPLETED, step=TOTAL_STEPS, saves=saves)
