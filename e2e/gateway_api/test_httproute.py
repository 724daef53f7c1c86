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
        changes = {"router": None, "engine.scheduler.maxModelLen": 512, "pools": [{"name": "main", "replicas": 2}]}
        found.apply(deployment("chat", model, changes))
        found.wait("trainingjob", "base", "Completed")
        found.wait("inferencedeployment", "chat", "Serving")
        yield found


@pytest.fixture(scope="module")
def sent() -> bytearray:
    """What the gateway has sent to the router."""
    return bytearray()


@pytest.fixture(scope="module")
def gateway(served: Installation, sent: bytearray) -> Iterator[str]:
    """The address of a gateway with the example's route."""
    port = free_port()
    with relay(*served.router(), sent) as (host, endpoint), running(served.plane, traefik(served.plane, port)):
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


def engines(served: Installation) -> dict[str, Object]:
    """The engines that run, by name."""
    pods = [pod for pod in served.all("pods") if pod["metadata"]["labels"].get("stoker.dev/role") == "engine"]
    return {pod["metadata"]["name"]: pod for pod in pods if pod["status"].get("phase") == "Running"}


def metric(pod: Object, pattern: str) -> float:
    """Return the sum of an engine's samples whose name and labels match."""
    (port,) = [one["containerPort"] for one in pod["spec"]["containers"][0]["ports"] if one["name"] == "http"]
    metrics = httpx.get(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=60, trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", metrics, re.MULTILINE))


def finished(served: Installation, reason: str) -> float:
    """Return the number of requests of all engines that ended for a reason."""
    pattern = rf'vllm:request_success_total\{{.*finished_reason="{reason}".*\}}'
    return sum(metric(pod, pattern) for pod in engines(served).values())


def busy_engine(served: Installation) -> str:
    """Return the name of the engine with a running request, or nothing."""
    pattern = r"vllm:num_requests_running(?:\{.*\})?"
    return next((name for name, pod in engines(served).items() if metric(pod, pattern)), "")


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


def test_the_trace_of_a_client_reaches_the_router(served: Installation, gateway: str, sent: bytearray) -> None:
    eventually(lambda: answers(gateway), PATIENCE_S)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with httpx.Client(base_url=gateway, headers=HOST, timeout=PATIENCE_S, trust_env=False) as client:
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        body = {**chat(4), "stream": False}
        assert client.post("/v1/chat/completions", headers=headers, json=body).status_code == 200
    assert re.search(rb"(?i)traceparent: 00-" + trace.encode() + rb"-[0-9a-f]{16}-01", bytes(sent))


def resumed(served: Installation) -> float:
    """Return the number of streams that went on at another engine."""
    host, port = served.router()
    text = httpx.get(f"http://{host}:{port}/metrics", timeout=60, trust_env=False).text
    return float(re.findall(r"^stoker_router_resumed_streams_total (\S+)$", text, re.MULTILINE)[0])


def streamed_while_its_engine_dies(served: Installation, gateway: str, tokens: int) -> list[str]:
    """Return the events of a stream whose engine is killed, if it is found while the stream runs."""
    body = {**chat(tokens), "stream_options": {"include_usage": True}}
    with (
        httpx.Client(base_url=gateway, headers=HOST, timeout=PATIENCE_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        events = [next(lines)]
        if victim := busy_engine(served):
            served.releases.kubectl("delete", "pod", victim, "--namespace", USER, "--grace-period=0", "--force")
        return events + list(lines)


def test_a_stream_outlives_its_engine_behind_the_gateway(served: Installation, gateway: str) -> None:
    """Its engine is killed under it; the client gets every token, in one answer."""
    tokens = 440
    for _ in range(5):  # a stream may end before its engine is found
        eventually(lambda: answers(gateway) and len(engines(served)) == 2, PATIENCE_S)
        events = streamed_while_its_engine_dies(served, gateway, tokens)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert chunks[-1]["usage"]["completion_tokens"] == tokens
        assert [part["finish_reason"] for chunk in chunks for part in chunk["choices"]][-1] == "length"
        if resumed(served):
            return
    raise AssertionError("no stream was found at its engine")
