"""Replicas over two pods on an embedded cluster: a killed pod costs its replica, and no answer."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from testing.stories.load import Load
from testing.stories.manifests import EXACT, Manifest, claim
from testing.stories.story_cluster import Object, StoryCluster
from testing.stories.waits import TIMEOUT_S

NAME = "giant"
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-multi-node" / "serve.yaml"
SMALL: dict[str, Any] = {
    "threads": 1,
    "deterministic": True,
    "cache": {"memoryBytes": 16 << 20},
    "scheduler": {"maxBatchTokens": 256, "maxRequests": 16, "maxModelLen": 256},
}
ENOUGH = 6


def example(axis: str) -> Manifest:
    """The example with engines of this machine's size: a rank in each of its two pods."""
    manifest: Manifest = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    manifest["spec"]["model"]["dtype"] = EXACT
    manifest["spec"]["engine"] = {**manifest["spec"].get("engine", {}), **copy.deepcopy(SMALL)}
    (pool,) = manifest["spec"]["pools"]
    for field in ("gpusPerPod", "resources", "tolerations"):
        del pool[field]
    manifest["spec"]["engine"]["cache"] |= {"hostMemoryBytes": 16 << 20, "disk": {"bytes": 32 << 20}}
    pool |= {"replicas": 2, "parallelism": {axis: pool["podsPerReplica"]}, "gracePeriodSeconds": 20}
    manifest["spec"]["router"] = {"service": {"port": 8000}, "policy": "roundRobin"}
    return manifest


@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_a_killed_pod_costs_its_replica_and_no_answer(
    cluster: StoryCluster, taught: Path, tmp_path: Path, axis: str
) -> None:
    """Of tensor ranks the leader answers; of data-parallel ones every pod does."""
    models = tmp_path / "models"
    shutil.copytree(sorted(taught.glob("step-*"))[-1], models / "llama-405b")
    cluster.apply(claim("models", models), example(axis))
    cluster.wait("InferenceDeployment", NAME, serves, "serving from two replicas")
    before = replicas(cluster)
    assert sorted(map(len, before.values())) == [2, 2]
    leader, member = before[min(before)]
    endpoints = [pod for pod, *others in before.values() for pod in (pod, *(others if axis == "data" else ()))]
    if axis == "tensor":
        cluster.wait_until(lambda: ranks_of(leader) == [0, 1], "both ranks listed by the leader")
    cluster.wait_until(lambda: answering(cluster) == named(endpoints), "answers of every endpoint and no other pod")
    cluster.wait_until(lambda: all(disk_of(pod) == "ok" for pod in endpoints), "open disks of all pods")

    with Load(cluster.ready_url(NAME), "llama-405b", lengths=(16, 24, 100)) as load:
        more_answers(cluster, load)
        os.killpg(main_pid(member), signal.SIGKILL)
        lost = {pod["metadata"]["uid"] for pod in (leader, member)}
        cluster.wait_until(lambda: not lost & uids(cluster), "both pods of the replica gone")
        cluster.wait("InferenceDeployment", NAME, serves, "serving from two replicas again")
        cluster.wait_until(lambda: len(uids(cluster)) == 4 and not lost & uids(cluster), "another whole replica")
        more_answers(cluster, load)
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"
    told = cluster.status("EnginePool", f"{NAME}-main")["lastFailure"]
    assert told.startswith(f"replica {leader['metadata']['name']}: ")

    cluster.delete("InferenceDeployment", NAME)
    cluster.wait_until(lambda: not cluster.all("Secret") and not uids(cluster), "pools and key gone")


def answering(cluster: StoryCluster) -> set[str]:
    """Return the uids of the pods that answer some requests, which the router sends to each in turn."""
    body = {"model": "llama-405b", "prompt": "Then coal met", "max_tokens": 1}
    with httpx.Client(base_url=cluster.ready_url(NAME), timeout=TIMEOUT_S) as client:
        answers = [client.post("/v1/completions", json=body) for _ in range(8)]
    return {answer.headers["x-stoker-pod-uid"] for answer in answers if answer.status_code == 200}


def named(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def replicas(cluster: StoryCluster) -> dict[str, list[Object]]:
    """Engine pods by replica, the leader first."""
    found: dict[str, list[Object]] = {}
    for pod in sorted(cluster.pods(role="engine"), key=lambda pod: str(pod["metadata"]["name"])):
        found.setdefault(pod["metadata"]["labels"]["stoker.dev/replica"], []).append(pod)
    return found


def ranks_of(leader: Object) -> list[int]:
    """Ranks that the leader lists; none in the first second, before its core has told of them."""
    told = httpx.get(f"http://{leader['status']['podIP']}:8000/status", timeout=TIMEOUT_S).json()
    return [rank["rank"] for rank in told["ranks"]]


def disk_of(endpoint: Object) -> str:
    """The state of the disks below an endpoint: its own, and those of the pods that compute with it."""
    tier = httpx.get(f"http://{endpoint['status']['podIP']}:8000/status", timeout=TIMEOUT_S).json()["disk_tier"]
    return str(tier["state"]) if tier is not None else "not reported"


def uids(cluster: StoryCluster) -> set[str]:
    return named(cluster.pods(role="engine"))


def serves(found: Object) -> bool:
    status = found.get("status") or {}
    return (status.get("phase"), status.get("ready")) == ("Serving", "2/2")


def main_pid(pod: Object) -> int:
    """Return the pid of the program, which leads the pod's process group."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))


def more_answers(cluster: StoryCluster, load: Load) -> None:
    wanted = len(load.answers) + ENOUGH
    cluster.wait_until(lambda: load.failures or len(load.answers) >= wanted, "more answers")
