"""A deployment without an engine: a smaller model of another one answers, whose endpoint has both models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    small["spec"]["router"]["models"] = [
        {"name": name, "deploymentRef": {"name": deployment}} for name, deployment in (("big", "big"), ("no", "where"))
    ]
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
    serves_both_models(cluster, body, answer.json()["choices"][0]["text"])
    for name in ("big", "small"):
        cluster.delete("InferenceDeployment", name)


def serves_both_models(cluster: StoryCluster, body: dict[str, Any], text: str) -> None:
    """At the endpoint of `small`: its own model, `big`, whose fallback is `small` again, and one that is missing."""
    with httpx.Client(base_url=cluster.url("small"), timeout=60) as client:
        answers = {name: client.post("/v1/completions", json={**body, "model": name}) for name in ("tiny", "big")}
        assert [answer.json()["model"] for answer in answers.values()] == ["tiny", "tiny"]
        assert {answer.json()["choices"][0]["text"] for answer in answers.values()} == {text}
        passed = [answers[name].headers.get("x-stoker-passed-on") for name in ("tiny", "big")]
        assert passed == [None, "big"]
        missing = client.post("/v1/completions", json={**body, "model": "no"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (503, "model_unavailable")
        unknown = client.post("/v1/completions", json={**body, "model": "x"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        listed = client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("ready", True)) for card in listed] == [("tiny", True), ("big", False), ("no", False)]
    others = cluster.get("InferenceDeployment", "small")["status"]["otherModels"]
    assert [(one["name"], one["deployment"], one["ready"]) for one in others] == [
        ("big", "big", False),
        ("no", "where", False),
    ]
    assert cluster.condition("InferenceDeployment", "small", "ModelsMissing")
