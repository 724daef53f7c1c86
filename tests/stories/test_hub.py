"""A checkpoint is pushed to a hub; two engines of one node and a job that trains on fetch it from there, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from testing.checkpoint.hub_server import TOKEN, HubServer
from testing.stories.manifests import claim, corpus, deployment, job
from testing.stories.story_cluster import StoryCluster

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"HF_TOKEN": TOKEN}}


def push(checkpoint: Path, hub: HubServer) -> str:
    """Run `stoker checkpoint push`; return the commit."""
    command = [sys.executable, "-m", "stoker.checkpoint", "push", str(checkpoint), "hf://team/teller"]
    access = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}  # the stand-in has no Xet
    done = subprocess.run(command, env={**os.environ, **access}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("commit:")[2]


def engine_digests(cluster: StoryCluster) -> list[str | None]:
    (pool,) = cluster.all("EnginePool")
    return [one.get("modelDigest") for one in pool["status"].get("engines", ())]


def test_a_model_of_the_hub_is_pushed_served_and_trained_on(cluster: StoryCluster, taught: Path) -> None:
    with HubServer() as hub:
        commit = push(max(taught.glob("step-*")), hub)
        assert hub.repositories["team/teller"].private
        endpoint = [{"name": "HF_ENDPOINT", "value": hub.endpoint}]
        model = {"uri": "hf://team/teller", "uriSecretRef": {"name": "hub"}}
        chat = deployment("teller", model)
        chat["spec"]["pools"][0] |= {"replicas": 2, "env": endpoint}
        source = {"id": "team/teller", "tokenSecretRef": {"name": "hub", "key": "HF_TOKEN"}}
        changes = {"model": None, "modelFrom": {"hub": source}, "workers.env": endpoint, "training.totalSteps": 5}
        training = job("further", {**changes, "data.tokenizer": None})
        cluster.apply(corpus(), claim("checkpoints"), claim("logs"), SECRET, chat, training)

        cluster.wait_for_phase("InferenceDeployment", "teller", "Serving")
        cluster.wait_until(lambda: cluster.status("InferenceDeployment", "teller")["ready"] == "2/2", "two engines")
        digests = {f"commit:{commit}"}
        cluster.wait_until(lambda: engine_digests(cluster) == [*digests, *digests], "the digest of both engines")
        cluster.wait_until(
            lambda: {cluster.status("InferenceDeployment", "teller").get("modelDigest")} == digests, "the digest"
        )
        with httpx.Client(base_url=cluster.url("teller"), timeout=30) as client:
            body = {"model": "teller", "prompt": "Then the fire met", "max_tokens": 8, "temperature": 0}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8

        cluster.wait_for_phase("TrainingJob", "further", "Completed")
        assert [one for one in hub.fetched if ".safetensors" in one] == ["model.safetensors from 0"]
        logs = "".join(cluster.log(pod) for pod in cluster.all("Pod"))
        assert TOKEN not in logs
