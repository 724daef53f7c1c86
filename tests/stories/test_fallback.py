"""A deployment without an engine: another one's smaller model answers under its own name, streams too."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from testing.stories.manifests import adopted, claim, deployment
from testing.stories.story_cluster import StoryCluster


def test_a_smaller_model_answers_while_no_engine_can(cluster: StoryCluster, taught: Path) -> None:
    newest = max(path.name for path in taught.glob("step-*"))
    small = deployment("small", {"checkpointRef": {"name": "newest"}, "names": ["tiny"]})
    fallback = {"router.fallback": {"deploymentRef": {"name": "small"}}}
    big = deployment("big", {"checkpointRef": {"name": "newest"}}, fallback)
    big["spec"]["pools"][0]["replicas"] = 0
    cluster.apply(claim("archive", taught.parent), adopted("newest", "archive", "taught", newest), big)
    cluster.wait_until(lambda: cluster.condition("InferenceDeployment", "big", "FallbackMissing"), "named as missing")
    cluster.apply(small)
    cluster.wait_for_phase("InferenceDeployment", "small", "Serving")
    cluster.wait_until(lambda: not cluster.condition("InferenceDeployment", "big", "FallbackMissing"), "found")
    cluster.wait_for_phase("InferenceDeployment", "big", "ScaledToZero")

    body = {"model": "big", "prompt": "Then coal met", "max_tokens": 4, "temperature": 0}
    url = f"{cluster.url('big')}/v1/completions"
    cluster.wait_until(lambda: httpx.post(url, json=body, timeout=60).status_code == 200, "an answer")
    answer = httpx.post(url, json=body, timeout=60)
    assert (answer.json()["model"], answer.headers["x-stoker-fallback"]) == ("tiny", "small")
    stream = httpx.post(url, json={**body, "stream": True}, timeout=60)
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if line.startswith("data: {")
    ]
    assert {chunk["model"] for chunk in chunks} == {"tiny"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer.json()["choices"][0]["text"]
    for name in ("big", "small"):
        cluster.delete("InferenceDeployment", name)
