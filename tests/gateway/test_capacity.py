"""GPUs of the cluster and their use: counted from nodes and pods, measured by DCGM where it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.domain.capacity import GpuResource, capacities, gpus_of_pod
from stoker.gateway.domain.claimed_gpus import ClaimedGpus
from stoker.gateway.domain.gpu_use import GpuAgent, figures_of, gpu_agents
from stoker.operator.domain.plan import Object
from testing.gateway.console_world import AGENT_PORT, gpu_agent
from testing.gateway.world import KEY, World
from testing.operator.devices import claim, device, resource_slice
from testing.pod.nvml import FakeGpu, FakeNvml

Tell = Callable[..., None]
GIB = 1 << 30
SAMPLES = {
    "DCGM_FI_DEV_GPU_UTIL": {"0": 50, "1": 100},
    "DCGM_FI_DEV_FB_USED": {"0": 1024, "1": 3072},
    "DCGM_FI_DEV_FB_FREE": {"0": 3072, "1": 1024},
}


def dcgm(request: httpx.Request) -> httpx.Response:
    """A Prometheus with the metrics of two GPUs."""
    values = SAMPLES[request.url.params["query"]]
    result = [{"metric": {"Hostname": "local", "gpu": gpu}, "value": [0, str(value)]} for gpu, value in values.items()]
    return httpx.Response(200, json={"data": {"result": result}})


def test_gpus_that_pods_hold_are_not_available(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        found.pod(job, 0, "", gpus=1)
        found.pod(found.put_status(found.job("done"), phase="Completed"), 0, "", gpus=1, phase="Succeeded")
        status = (await found.client.get("/v1/cluster/status")).json()
        figures = {
            name: status[name] for name in ("total_gpus", "available_gpus", "active_jobs", "nodes", "ready_nodes")
        }
        assert figures == {"total_gpus": 2, "available_gpus": 1, "active_jobs": 1, "nodes": 1, "ready_nodes": 1}
        assert (status["gpu_utilization"], status["memory_utilization"]) == (None, None)
        assert status["unavailable"]["gpu_utilization"] == "not measured: no Prometheus is configured (prometheus_url)"
        (node,) = (await found.client.get("/v1/cluster/nodes")).json()
        assert (node["node_id"], node["gpus"], node["status"], node["gpu_memory_used"]) == ("local", 2, "Ready", None)
        assert "no Prometheus" in node["unavailable"]["gpu_memory_used"]

    tell(story)


def test_use_is_dcgms(tell: Tell) -> None:
    async def story(found: World) -> None:
        status = (await found.client.get("/v1/cluster/status")).json()
        assert (status["gpu_utilization"], status["memory_utilization"], status["unavailable"]) == (0.75, 0.5, {})
        (node,) = (await found.client.get("/v1/cluster/nodes")).json()
        assert node["gpu_memory_used"] == [1024 * 2**20, 3072 * 2**20]

    tell(story, prometheus=Prometheus("http://prometheus", httpx.MockTransport(dcgm)))


def gpus(*busy: int | None, node: str = "a") -> FakeNvml:
    """GPUs of 80 GiB that hold 20 each; None is one whose load the driver does not give."""
    places = range(len(busy))
    return FakeNvml([FakeGpu(f"GPU-{node}{n}", f"0000:{9 - n}", busy[n], 20 << 30, 80 << 30) for n in places])


async def answers(found: World, token: str = KEY) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster's state, and that of its node."""
    headers = {"Authorization": f"Bearer {token}"}
    status = await found.client.get("/v1/cluster/status", headers=headers)
    (node,) = (await found.client.get("/v1/cluster/nodes", headers=headers)).json()
    return status.json(), node


def gpu_pod(found: World, rank: int, gpus: int, *, job: str = "run") -> Object:
    return found.pod(found.job(job), rank, "", gpus=gpus, port=AGENT_PORT)


def test_without_dcgm_use_is_what_the_agents_of_pods_with_gpus_measure(tell: Tell) -> None:
    async def story(found: World) -> None:
        async with (
            gpu_agent(found, gpu_pod(found, 0, 1), gpus(50, None)),
            gpu_agent(found, gpu_pod(found, 0, 1, job="other"), gpus(50)),
        ):  # both see the same first GPU
            status, node = await answers(found)
        assert (status["gpu_source"], status["gpus_measured"], status["unavailable"]) == ("agents", 2, {})
        assert (status["gpu_utilization"], status["memory_utilization"]) == (0.5, 0.25)
        assert (node["gpu_source"], node["gpu_memory_used"], node["unavailable"]) == ("agents", [20 * GIB] * 2, {})
        memory = {"memory_used": 20 * GIB, "memory_total": 80 * GIB}
        assert node["gpu_devices"] == [
            {"gpu": "GPU-a1", "utilization": None, **memory},
            {"gpu": "GPU-a0", "utilization": 0.5, **memory},
        ], "in the order of their places"

    tell(story, sockets=True)


def test_an_agent_measures_the_gpus_of_its_own_pod(tell: Tell) -> None:
    async def story(found: World) -> None:
        async with gpu_agent(found, gpu_pod(found, 0, 1), gpus(50)):
            _, node = await answers(found)
        assert (node["gpu_memory_used"], len(node["gpu_devices"])) == ([20 * GIB], 1)
        assert node["unavailable"] == {
            "gpu_devices": "1 of 2 GPUs are measured: an agent measures the GPUs of its own pod"
        }

    tell(story, sockets=True)


def test_dcgm_comes_first_and_no_agent_is_asked(tell: Tell) -> None:
    async def story(found: World) -> None:
        gpu_pod(found, 0, 2)  # nothing answers at its port
        status, node = await answers(found)
        assert (status["gpu_source"], status["gpu_utilization"], status["gpus_measured"]) == ("dcgm", 0.75, 2)
        assert (node["gpu_source"], node["unavailable"]) == ("dcgm", {})
        assert [gpu["utilization"] for gpu in node["gpu_devices"]] == [0.5, 1.0]

    tell(story, sockets=True, prometheus=Prometheus("http://prometheus", httpx.MockTransport(dcgm)))


def test_an_agent_that_does_not_answer_is_a_reason(tell: Tell) -> None:
    async def story(found: World) -> None:
        gpu_pod(found, 0, 2)
        status, node = await answers(found)
        for reason in (status["unavailable"]["gpu_utilization"], node["unavailable"]["gpu_memory_used"]):
            assert "no Prometheus is configured" in reason
            assert "the metrics of 1 of 1 pods with GPUs cannot be read" in reason
        assert (node["gpu_devices"], node["gpu_source"], status["gpus_measured"]) == ([], None, 0)

    tell(story, sockets=True)


def test_the_agents_are_asked_with_the_callers_own_right(tell: Tell) -> None:
    async def story(found: World) -> None:
        if found.server is None:
            return  # the embedded cluster has one user
        async with gpu_agent(found, gpu_pod(found, 0, 2), gpus(50, 50)):
            status, node = await answers(found, "reader")
        assert (node["gpus"], node["gpu_devices"]) == (2, [])
        assert "forbidden" in status["unavailable"]["gpu_utilization"].lower()

    tell(story, sockets=True)


@pytest.mark.parametrize(
    "text",
    [
        'stoker_gpu_utilization_ratio{uuid="GPU-1"} NaN',
        'stoker_gpu_memory_used_bytes{uuid="GPU-1"} -3',
        'stoker_gpu_memory_used_bytes{gpu="0"} 7',
        "stoker_trainer_step 5",
    ],
)
def test_a_value_that_is_no_figure_is_left_out(text: str) -> None:
    assert figures_of(text + "\n") == []


def test_only_running_pods_of_trainers_and_engines_with_gpus_are_asked() -> None:
    def pod(name: str, *, role: str = "engine", phase: str = "Running", gpus: int = 1, port: bool = True) -> Object:
        container: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
        if port:
            container["ports"] = [{"name": "http", "containerPort": 8000}]
        metadata = {"name": name, "namespace": "default", "labels": {"stoker.dev/role": role}}
        return {"metadata": metadata, "spec": {"nodeName": "n", "containers": [container]}, "status": {"phase": phase}}

    pods = [
        pod("good"), pod("router", role="router"), pod("waits", phase="Pending"), pod("cpu", gpus=0),
        pod("silent", port=False),
    ]  # fmt: skip
    assert gpu_agents(pods) == [GpuAgent("n", "default", "good", 8000)]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(500), "500"),
        (httpx.Response(200, text="no"), "not measured"),
        (httpx.Response(200, json={"data": {"result": []}}), "has no metrics of DCGM"),
    ],
)
def test_a_prometheus_without_an_answer_is_a_reason_and_no_error(tell: Tell, answer: httpx.Response, why: str) -> None:
    async def story(found: World) -> None:
        status = await found.client.get("/v1/cluster/status")
        assert status.status_code == 200
        assert why in status.json()["unavailable"]["gpu_utilization"]

    tell(story, prometheus=Prometheus("http://prometheus", httpx.MockTransport(lambda _: answer)))


def node(name: str, gpus: int, *, ready: bool = True, cordoned: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "Unknown"}]
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": conditions}
    return {"metadata": {"name": name}, "spec": {"unschedulable": cordoned}, "status": status}


def test_a_node_that_takes_no_pods_has_no_available_gpus() -> None:
    found = capacities([node("a", 8), node("b", 8, ready=False), node("c", 8, cordoned=True)], [])
    assert [(one.status, one.gpus, one.available_gpus) for one in found] == [
        ("Ready", 8, 8),
        ("NotReady", 8, 0),
        ("Cordoned", 8, 0),
    ]


ON_PLUGINS: dict[str, dict[str, str]] = {
    "whole": {"nvidia.com/gpu": "8"},
    "mixed MIG": {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "7", "nvidia.com/mig-3g.40gb": "0"},
    "shared by time": {"nvidia.com/gpu.shared": "4"},
    "no GPU": {"cpu": "64", "memory": "10Gi", "example.com/nvidia.com": "3"},
}


@pytest.mark.parametrize(
    ("name", "total", "available"),
    [("whole", 8, 8), ("mixed MIG", 8, 6), ("shared by time", 4, 4), ("no GPU", 0, 0)],
)
def test_the_resources_of_device_plugins_are_gpus(name: str, total: int, available: int) -> None:
    found = node("a", 0)
    found["status"]["allocatable"] = ON_PLUGINS[name]
    (one,) = capacities([found], [asking({"nvidia.com/mig-1g.10gb": "2"}, node="a")])
    assert (one.gpus, one.available_gpus) == (total, available)


def test_resources_of_one_node_keep_their_names() -> None:
    found = node("a", 1)
    found["status"]["allocatable"] |= {"nvidia.com/mig-1g.10gb": "7"}
    (one,) = capacities([found], [asking({"nvidia.com/mig-1g.10gb": "2"}, node="a")])
    assert one.gpu_resources == (GpuResource("nvidia.com/gpu", 1, 1), GpuResource("nvidia.com/mig-1g.10gb", 7, 5))


def asking(limits: dict[str, str], *, node: str = "", claims: tuple[str, ...] = ()) -> dict[str, Any]:
    entries = [{"name": f"c{number}", "resourceClaimName": name} for number, name in enumerate(claims)]
    spec = {"nodeName": node, "containers": [{"resources": {"limits": limits}}], "resourceClaims": entries}
    return {"metadata": {"name": "p", "namespace": "default"}, "spec": spec, "status": {"phase": "Running"}}


def partition(name: str, gpu: int) -> dict[str, Any]:
    return {**device(name), "consumesCounters": [{"counterSet": f"gpu-{gpu}", "counters": {}}]}


TAINTED = {**device("sick"), "taints": [{"key": "unhealthy", "effect": "NoExecute"}]}
CHANNELS = resource_slice("a", [device("channel-0")], name="channels")
CHANNELS["spec"]["driver"] = "compute-domain.nvidia.com"


@pytest.mark.parametrize(
    ("slices", "claims", "total", "available"),
    [
        ([resource_slice("a", [device("d0"), device("d1")])], [], 2, 2),
        ([resource_slice("a", [device("d0"), device("d1")])], [claim("c", [("a", "d1")])], 2, 1),
        ([resource_slice("a", [device("d0")], resourceSliceCount=2)], [], 0, 0),
        ([resource_slice("a", [device("d0"), TAINTED])], [], 2, 1),
        ([resource_slice("a", [partition("whole", 0), partition("half", 0), partition("other", 1)])], [], 2, 2),
        ([resource_slice("a", [partition("a", 0), partition("b", 0)])], [claim("c", [("a", "b")])], 1, 0),
        ([CHANNELS], [], 0, 0),
        ([resource_slice("a", [device("d0")])], [claim("c", [("a", "gone")])], 1, 1),
    ],
    ids=["free", "claimed", "half a pool", "tainted", "partitions", "a part is claimed", "no GPUs", "gone device"],
)
def test_devices_of_gpu_drivers_are_gpus(
    slices: list[Object], claims: list[Object], total: int, available: int
) -> None:
    (found,) = capacities([node("a", 0)], [], ClaimedGpus(slices, claims))
    assert (found.gpus, found.available_gpus) == (total, available)
    assert found.gpu_resources == ((GpuResource("gpu.example.com", total, available),) if total else ())


def test_a_pod_has_what_it_asks_for_and_what_its_claims_hold() -> None:
    claimed = ClaimedGpus([], [claim("mine", [("a", "d0"), ("a", "d1")]), claim("other", [("a", "d2")])])
    found = asking({"nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "2"}, claims=("mine",))
    found["spec"]["resourceClaims"].append({"name": "t", "resourceClaimTemplateName": "two"})
    assert gpus_of_pod(found, claimed) == 5
    found["status"]["resourceClaimStatuses"] = [{"name": "t", "resourceClaimName": "other"}]
    assert gpus_of_pod(found, claimed) == 6
    assert gpus_of_pod(found) == 3


def test_gpus_of_drivers_are_answered_with_their_names(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.devices.serve(resource_slice("local", [device("d0"), device("d1")]), claim("run-gpu", [("local", "d0")]))
        status, node = await answers(found)
        assert (status["total_gpus"], status["available_gpus"]) == (4, 3)
        assert node["gpu_resources"] == [
            {"name": "gpu.example.com", "total": 2, "available": 1},
            {"name": "nvidia.com/gpu", "total": 2, "available": 2},
        ]
        job = found.job()
        found.pod(job, 0, "", claims=("run-gpu",))
        (pod,) = (await found.client.get("/v1/training/jobs/run/pods")).json()
        assert pod["gpus"] == 1

    tell(story)


def test_devices_that_the_caller_may_not_read_are_a_reason(tell: Tell) -> None:
    async def story(found: World) -> None:
        if found.server is None:
            return  # the embedded cluster has one user
        found.devices.serve(resource_slice("local", [device("d0")]))
        found.server.withheld = {"resourceslices"}
        status, node = await answers(found)
        assert (status["total_gpus"], node["gpus"]) == (2, 2)
        for reason in (status["unavailable"]["total_gpus"], node["unavailable"]["gpus"]):
            assert reason.startswith("GPUs of dynamic resource allocation are not counted: resourceslices is forbidden")
        found.server.withheld = {"resourceclaims"}
        job = found.job()
        found.pod(job, 0, "", claims=("run-gpu",))
        found.pod(job, 1, "", gpus=1)
        claiming, plain = (await found.client.get("/v1/training/jobs/run/pods")).json()
        reason = claiming["unavailable"]["gpus"]
        assert reason.startswith("GPUs of the pod's claims are not known: resourceclaims is forbidden")
        assert (claiming["gpus"], plain["gpus"], plain["unavailable"]) == (None, 1, {})

    tell(story)


def test_the_largest_first_container_counts_if_it_asks_for_more() -> None:
    def container(gpus: int) -> dict[str, Any]:
        return {"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}

    def pod(*own: dict[str, Any], first: list[dict[str, Any]]) -> dict[str, Any]:
        return {"metadata": {}, "spec": {"containers": list(own), "initContainers": first}}

    sidecar = {**container(1), "restartPolicy": "Always"}
    assert gpus_of_pod(pod(container(1), container(2), first=[container(4)])) == 4
    assert gpus_of_pod(pod(container(1), container(2), first=[container(1)])) == 3
    assert gpus_of_pod(pod(container(2), first=[sidecar, container(1)])) == 3
    assert gpus_of_pod(pod(container(1), first=[sidecar, container(4)])) == 5
    assert gpus_of_pod(pod(container(1), first=[container(4), sidecar])) == 4
