"""A job saves into a bucket over a bad line; its Checkpoints are verified, pruned, adopted and served there."""

from __future__ import annotations

import httpx

from testing.checkpoint.s3_server import KEY, SECRET, S3Server
from testing.stories.buckets import secret, storage
from testing.stories.manifests import checkpoint, claim, corpus, deployment, job
from testing.stories.story_cluster import StoryCluster
from testing.stories.waits import TIMEOUT_S


def folders(server: S3Server) -> set[str]:
    return {name.split("/")[2] for name in server.objects if name.endswith("/manifest.json")}


def test_a_bucket_holds_the_checkpoints_of_a_job_and_its_model_is_served_from_there(cluster: StoryCluster) -> None:
    with S3Server() as server:
        server.fault = lambda number, _method: "cut" if number % 23 == 0 else ""
        changes = {"checkpoint.storage": storage(server, "models"), "checkpoint.maxToKeep": 2}
        cluster.apply(corpus(), claim("logs"), secret(), job("afar", changes))
        cluster.wait_for_phase("TrainingJob", "afar", "Completed")

        cluster.wait_until(lambda: len(folders(server)) == len(cluster.all("Checkpoint", job="afar")) == 2, "two saves")
        cluster.wait_until(
            lambda: all(one["status"].get("verifiedBy") for one in cluster.all("Checkpoint")), "verified"
        )
        saves = [found["status"] for found in cluster.all("Checkpoint", job="afar")]
        assert {found["folder"] for found in saves} == folders(server)
        assert {found["storage"]["s3"]["prefix"] for found in saves} == {"afar"}
        assert {found["verifiedBy"] for found in saves} == {"Agent"}

        newest = max(saves, key=lambda found: found["step"])
        source = {"import": {"storage": storage(server, "models", "afar"), "folder": newest["folder"]}}
        cluster.apply(checkpoint("adopted", source), deployment("teller", {"checkpointRef": {"name": "adopted"}}))
        cluster.wait_for_phase("InferenceDeployment", "teller", "Serving")
        adopted = cluster.status("Checkpoint", "adopted")
        assert (adopted["digest"], adopted["verifiedBy"]) == (newest["digest"], "Task")
        with httpx.Client(base_url=cluster.ready_url("teller"), timeout=TIMEOUT_S) as client:
            body = {"model": "teller", "prompt": "Then the fire met", "max_tokens": 24, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 24

        logs = "".join(cluster.log(pod) for pod in cluster.all("Pod"))
        assert KEY not in logs
        assert SECRET not in logs
