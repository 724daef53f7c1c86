"""A checkpoint is pushed to a hub, a bucket and a registry, and fetched from there, once for each node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx

from testing.checkpoint.hub_server import TOKEN, HubServer
from testing.checkpoint.registry_server import PASSWORD, RegistryServer
from testing.checkpoint.s3_server import SECRET as SECRET_KEY
from testing.checkpoint.s3_server import S3Server
from testing.stories.manifests import claim, corpus, deployment, job
from testing.stories.story_cluster import StoryCluster
from testing.stories.waits import TIMEOUT_S

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"HF_TOKEN": TOKEN}}


def push(checkpoint: Path, uri: str, access: Mapping[str, str]) -> str:
    """Run `stoker checkpoint push`; return the digest that it prints."""
    command = [sys.executable, "-m", "stoker.checkpoint", "push", str(checkpoint), uri]
    done = subprocess.run(command, env={**os.environ, **access}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stderr.splitlines() if "model.safetensors" in line] == [
        "sending model.safetensors"  # a line for each file, and no progress bar, where no terminal is
    ]
    return done.stdout.strip().rpartition("digest ")[2]


def engine_digests(cluster: StoryCluster) -> list[str | None]:
    (pool,) = cluster.all("EnginePool")
    return [one.get("modelDigest") for one in pool["status"].get("engines", ())]


def test_a_model_of_the_hub_is_pushed_served_and_trained_on(cluster: StoryCluster, taught: Path) -> None:
    with HubServer() as hub:
        access = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}  # the stand-in has no Xet
        digest = push(max(taught.glob("step-*")), "hf://team/teller", access)
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
        digests = {digest}
        cluster.wait_until(lambda: engine_digests(cluster) == [*digests, *digests], "the digest of both engines")
        cluster.wait_until(
            lambda: {cluster.status("InferenceDeployment", "teller").get("modelDigest")} == digests, "the digest"
        )
        with httpx.Client(base_url=cluster.ready_url("teller"), timeout=TIMEOUT_S) as client:
            body = {"model": "teller", "prompt": "Then the fire met", "max_tokens": 8, "temperature": 0}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8

        cluster.wait_for_phase("TrainingJob", "further", "Completed")
        assert [one for one in hub.fetched if ".safetensors" in one] == ["model.safetensors from 0"]
        logs = "".join(cluster.log(pod) for pod in cluster.all("Pod"))
        assert TOKEN not in logs


def test_a_model_of_a_bucket_and_one_of_a_registry_are_served_by_the_digests_that_pushes_print(
    cluster: StoryCluster, taught: Path
) -> None:
    with S3Server() as bucket, RegistryServer() as registry:
        sources = {
            "bucket": ("s3://models/teller", bucket.environment),
            "registry": (f"oci://{registry.place}/team/teller:v1", registry.login),
        }
        digests = {name: push(max(taught.glob("step-*")), uri, access) for name, (uri, access) in sources.items()}
        for name, (uri, access) in sources.items():
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(access)}
            cluster.apply(secret, deployment(name, {"uri": uri, "uriSecretRef": {"name": name}}))
        denied = deployment("denied", {"uri": "s3://models/teller"})
        cluster.apply(denied)

        texts = set()
        for name in sources:
            cluster.wait_for_phase("InferenceDeployment", name, "Serving")
            wait_for_digest(cluster, name, digests[name])
            body = {"model": name, "prompt": "Then the fire met", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{cluster.ready_url(name)}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
        told = "ModelError: [Errno 13] no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY were not given"
        cluster.wait_until(lambda: told in str(cluster.status("InferenceDeployment", "denied").get("message")), "why")
        logs = "".join(cluster.log(pod) for pod in cluster.all("Pod"))
        assert SECRET_KEY not in logs
        assert PASSWORD not in logs


def wait_for_digest(cluster: StoryCluster, name: str, digest: str) -> None:
    cluster.wait_until(
        lambda: cluster.status("InferenceDeployment", name).get("modelDigest") == digest, f"digest {digest}"
    )
