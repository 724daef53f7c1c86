"""GPUs of the cluster and their use: counted from nodes and pods, measured by DCGM where it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.domain.capacity import asked_gpus, capacities
from testing.gateway.world import World

Tell = Callable[..., None]
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


def test_the_largest_first_container_counts_if_it_asks_for_more() -> None:
    def container(gpus: int) -> dict[str, Any]:
        return {"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}

    assert asked_gpus({"spec": {"containers": [container(1), container(2)], "initContainers": [container(4)]}}) == 4
    assert asked_gpus({"spec": {"containers": [container(1), container(2)], "initContainers": [container(1)]}}) == 3
