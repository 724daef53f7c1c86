"""Two ranks train a model, its saves become verified Checkpoints, and two ranks serve the newest one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgpack
import zmq
from click.testing import CliRunner

from stoker.cli.local import local
from testing.stories.manifests import claim, corpus, deployment, job
from testing.stories.object_views import FIGURES, Object
from testing.stories.story_cluster import StoryCluster
from testing.stories.waits import TIMEOUT_S, phase


def test_two_ranks_train_a_model_that_is_served_from_its_newest_verified_checkpoint(cluster: StoryCluster) -> None:
    chat = deployment("teller", {"checkpointSelector": {"jobRef": {"name": "tell"}}})
    chat["spec"]["pools"][0] |= {"ranksPerPod": 2, "parallelism": {"tensor": 2}}
    chat["spec"]["engine"]["cacheEvents"] = {"port": 5557, "replayPort": 5657, "topic": "kv"}
    training = job("tell", {"workers.ranksPerPod": 2})
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), training, chat)

    cluster.wait_for_phase("TrainingJob", "tell", "Completed")

    status = cluster.status("TrainingJob", "tell")
    assert (status["progress"]["step"], status["worldSize"], status["dataParallel"]) == (60, 2, 2)
    assert status["newestVerifiedCheckpoint"]["step"] == 60
    saves = cluster.all("Checkpoint", job="tell")
    assert [(found["status"]["step"], found["status"]["phase"]) for found in saves] == [
        (20, "Complete"),
        (40, "Complete"),
        (60, "Complete"),
    ]
    for found in saves:
        assert sorted(cluster.figures(found["metadata"]["name"])) == sorted(FIGURES)
    _plots_the_whole_run_after_its_end(cluster)
    cluster.wait("InferenceDeployment", "teller", serves_the_last_save, "serving step 60")  # maybe earlier ones before
    cluster.wait_until(lambda: len(cluster.pods(role="engine")) == 1, "one engine")
    configs = [json.loads(found["data"]["config.json"]) for found in cluster.all("ConfigMap", role="engine")]
    assert {found["parallelism"]["tensor"] for found in configs} == {2}
    _tells_where_the_start_of_its_engine_went(cluster)
    with httpx.Client(base_url=cluster.ready_url("teller"), timeout=TIMEOUT_S) as client:
        assert [found["id"] for found in client.get("/v1/models").json()["data"]] == ["teller"]
        body = {"model": "teller", "prompt": "Then the fire met", "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert "met" in answer["choices"][0]["text"]
    _told_subscribers_what_its_cache_holds(cluster, answer["usage"]["total_tokens"])


def serves_the_last_save(found: Object) -> bool:
    status = found.get("status") or {}
    return phase(found) == "Serving" and (status.get("currentCheckpoint") or {}).get("step") == 60


def _told_subscribers_what_its_cache_holds(cluster: StoryCluster, tokens: int) -> None:
    """As a router of vLLM's would ask for the events that it missed."""
    (pod,) = cluster.all("Pod", role="engine")
    first, *others = _kept_events(f"tcp://{pod['status']['podIP']}:5657")
    assert first == ["AllBlocksCleared"]
    stored = [event for event in others if event[0] == "BlockStored"]
    assert stored[0][2] is None, "the first block of a prompt has no parent"
    assert all(len(ids) == len(hashes) * size for _, hashes, _, ids, size, *_ in stored)
    size = stored[0][4]
    assert sum(len(event[1]) for event in stored) == (tokens - 1) // size > 0


def _kept_events(endpoint: str) -> list[Any]:
    """Return the events of all batches that an engine has kept."""
    found: list[Any] = []
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        socket.connect(endpoint)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        while batch := socket.recv_multipart()[2]:  # the last answer has none
            _, events, _ = msgpack.unpackb(batch)
            found += events
    return found


def _tells_where_the_start_of_its_engine_went(cluster: StoryCluster) -> None:
    found = cluster.wait(
        "InferenceDeployment", "teller", lambda it: it["status"]["pools"][0].get("lastStart"), "the parts of a start"
    )
    start = found["status"]["pools"][0]["lastStart"]
    assert {"ranks", "warm", "ready"} <= start["parts"].keys(), start
    assert sum(start["parts"].values()) == start["seconds"]


def _plots_the_whole_run_after_its_end(cluster: StoryCluster) -> None:
    """The pods are gone with their logs; a task reads the metrics on the claim."""
    for pod in cluster.all("Pod", role="trainer"):
        cluster.delete("Pod", pod["metadata"]["name"])
    words = ["plot", "tell", "--json", "--state", str(cluster.state)]
    plotted = CliRunner().invoke(local, words)
    assert plotted.exit_code == 0, plotted.output
    loss = json.loads(plotted.stdout)["loss"]
    assert loss["steps"] == list(range(1, 61))
    assert loss["values"][-1] < loss["values"][0]
    part = CliRunner().invoke(local, [*words, "--after-step", "50"])
    assert json.loads(part.stdout)["loss"]["steps"] == list(range(51, 61))
    (task,) = cluster.all("Pod", role="metrics")
    assert task["status"]["phase"] == "Succeeded"
