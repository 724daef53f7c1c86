"""A deployment without an engine: a smaller model of another one answers, whose endpoint has both models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner

from stoker.cli.local import local
from testing.stories.manifests import adopted, claim, deployment
from testing.stories.story_cluster import StoryCluster
from testing.stories.waits import TIMEOUT_S


def test_a_smaller_model_answers_while_no_engine_can(cluster: StoryCluster, taught: Path) -> None:
    newest = max(path.name for path in taught.glob("step-*"))
    small = deployment("small", {"checkpointRef": {"name": "newest"}, "names": ["tiny"]})
    fallback = {"router.fallback": {"deploymentRef": {"name": "small"}}}
    big = deployment("big", {"checkpointRef": {"name": "newest"}}, fallback)
    big["spec"]["pools"][0] |= {"replicas": 0, "autoscaling": {"mode": "external", "min": 0, "max": 1}}
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
    cluster.wait_until(lambda: model_that_answers(url, body) == "tiny", "an answer")
    answer = httpx.post(url, json=body, timeout=TIMEOUT_S)
    assert (answer.json()["model"], answer.headers["x-stoker-fallback"]) == ("tiny", "small")
    stream = httpx.post(url, json={**body, "stream": True}, timeout=TIMEOUT_S)
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if line.startswith("data: {")
    ]
    assert {chunk["model"] for chunk in chunks} == {"tiny"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer.json()["choices"][0]["text"]
    serves_both_models(cluster, body, answer.json()["choices"][0]["text"])
    answers_itself_once_it_is_scaled(cluster, url, body)
    for name in ("big", "small"):
        cluster.delete("InferenceDeployment", name)


def answers_itself_once_it_is_scaled(cluster: StoryCluster, url: str, body: dict[str, Any]) -> None:
    """By hand, as an HPA does it; what lies beyond `max` is told."""
    words = ["scale", "epool/big-main", "3", "--state", str(cluster.state)]
    assert CliRunner().invoke(local, words).output == "enginepool/big-main scaled to 3\n"
    cluster.wait_for_phase("InferenceDeployment", "big", "Serving")
    cluster.wait_until(lambda: model_that_answers(url, body) == "big", "its own answer")  # its router hears of it then
    answer = httpx.post(url, json=body, timeout=TIMEOUT_S)
    assert (answer.json()["model"], answer.headers.get("x-stoker-fallback")) == ("big", None)
    cluster.wait_until(lambda: cluster.condition("InferenceDeployment", "big", "AutoscalingLimited"), "limited")
    limited = cluster.condition("InferenceDeployment", "big", "AutoscalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "OutOfBounds")
    assert len(cluster.pods(role="engine", deployment="big")) == 1
    missing = CliRunner().invoke(local, ["scale", "epool/none", *words[2:]])
    assert (missing.exit_code, "EnginePool default/none does not exist" in missing.output) == (1, True)
    other = CliRunner().invoke(local, ["scale", "infd/big", *words[2:]])
    assert "'infd/big' has no /scale: give epool/NAME" in other.output


def model_that_answers(url: str, body: dict[str, Any]) -> str:
    """The model of an answer; empty where none can answer yet."""
    try:
        answer = httpx.post(url, json=body, timeout=TIMEOUT_S)
    except httpx.TransportError:
        return ""
    return str(answer.json()["model"]) if answer.status_code == 200 else ""


def serves_both_models(cluster: StoryCluster, body: dict[str, Any], text: str) -> None:
    """At the endpoint of `small`: its own model, `big`, whose fallback is `small` again, and one that is missing."""
    with httpx.Client(base_url=cluster.ready_url("small"), timeout=TIMEOUT_S) as client:
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
