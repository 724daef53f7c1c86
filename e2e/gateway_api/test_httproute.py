"""The route of `deploy/gateway-api` in front of a deployment, through Traefik's own gateway, to a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.api.replica import eventually
from e2e.cluster.foreign_controllers import free_port, running, traefik
from e2e.gateway_api.relay import relay
from e2e.processes.installation import PATIENCE_S, USER, Installation, installation
from testing.stories.manifests import claim, corpus, deployment, job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "gateway-api" / "route.yaml"
HOST = {"Host": "chat.example.org"}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A cluster in which the deployment `chat` serves a model that a job has trained."""
    with installation(tmp_path_factory.mktemp("gateway"), ROOT) as found:
        eventually(found.operator("operator", ROOT).leads, PATIENCE_S)
        found.apply(corpus(), *(claim(name) for name in ("checkpoints", "logs")))
        found.apply(job("base", {"training.totalSteps": 20}))
        model = {"checkpointSelector": {"jobRef": {"name": "base"}}}
        changes = {"router": None, "engine.scheduler.maxModelLen": 512}
        found.apply(deployment("chat", model, changes))
        found.wait("trainingjob", "base", "Completed")
        found.wait("inferencedeployment", "chat", "Serving")
        yield found


@pytest.fixture(scope="module")
def gateway(served: Installation) -> Iterator[str]:
    """The address of a gateway with the example's route."""
    port = free_port()
    with relay(*served.router()) as (host, endpoint), running(served.plane, traefik(served.plane, port)):
        served.apply(endpoints(host, endpoint), gateway_class(), *example(port))
        yield f"http://127.0.0.1:{port}"


def example(port: int) -> Iterator[Object]:
    """The documented manifests, with the port of this gateway."""
    for body in yaml.safe_load_all(EXAMPLE.read_text()):
        for listener in body["spec"].get("listeners", ()):
            listener["port"] = port
        yield body


def gateway_class() -> Object:
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GatewayClass",
        "metadata": {"name": "traefik"},
        "spec": {"controllerName": "traefik.io/gateway-controller"},
    }


def endpoints(host: str, port: int) -> Object:
    """What the cluster's endpoint controller makes for the deployment's Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "chat-1", "labels": {"kubernetes.io/service-name": "chat"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def accepted(served: Installation) -> bool:
    """Whether the gateway has taken the route and found what it leads to."""
    route = served.one("httproute", "chat")
    conditions = [one for parent in route.get("status", {}).get("parents", ()) for one in parent["conditions"]]
    return {one["type"] for one in conditions if one["status"] == "True"} >= {"Accepted", "ResolvedRefs"}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", headers=HOST, timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def chat(tokens: int) -> Object:
    message = {"role": "user", "content": "Then the boiler met"}
    return {"model": "chat", "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True}


def finished(served: Installation, reason: str) -> float:
    """Return the number of requests of the engine that ended for a reason."""
    (pod,) = [pod for pod in served.all("pods") if pod["metadata"]["labels"].get("stoker.dev/role") == "engine"]
    (port,) = [one["containerPort"] for one in pod["spec"]["containers"][0]["ports"] if one["name"] == "http"]
    metrics = httpx.get(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=20, trust_env=False).text
    found = re.findall(
        rf'^vllm:request_success_total\{{.*finished_reason="{reason}".*\}} (\S+)$', metrics, re.MULTILINE
    )
    return sum(float(value) for value in found)


def test_a_streamed_chat_comes_through_the_gateway(served: Installation, gateway: str) -> None:
    eventually(lambda: accepted(served), PATIENCE_S)
    eventually(lambda: answers(gateway), PATIENCE_S)
    with (
        httpx.Client(base_url=gateway, headers=HOST, timeout=PATIENCE_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(32)) as answer,
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len(chunks) > 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["model"] for chunk in chunks} == {"chat"}


def test_the_gateway_passes_a_stream_on_while_it_grows_and_its_end_by_the_client(
    served: Installation, gateway: str
) -> None:
    """A gateway that kept the answer back would show its first chunk only when all 480 tokens are done."""
    eventually(lambda: accepted(served), PATIENCE_S)
    eventually(lambda: answers(gateway), PATIENCE_S)
    before = finished(served, "abort")
    with (
        httpx.Client(base_url=gateway, headers=HOST, timeout=PATIENCE_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(480)) as answer,
    ):
        assert next(line for line in answer.iter_lines() if line).startswith("data: ")
    eventually(lambda: finished(served, "abort") == before + 1, PATIENCE_S)


def test_what_the_route_does_not_name_stays_outside(served: Installation, gateway: str) -> None:
    eventually(lambda: answers(gateway), PATIENCE_S)
    with httpx.Client(base_url=gateway, timeout=PATIENCE_S, trust_env=False) as client:
        assert client.get("/v1/models").status_code == 404, "another host"
        assert client.get("/metrics", headers=HOST).status_code == 404, "another path"
        refused = client.post("/v1/chat/completions", headers=HOST, json={**chat(4), "max_tokens": -1})
    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"], "the router's own answer"
    assert served.one("service", "chat")["metadata"]["namespace"] == USER
