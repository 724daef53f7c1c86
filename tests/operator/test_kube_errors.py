"""Refusals of an API server become errors of the interface that name the next step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stoker.operator.cluster import interface
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.kube.errors import error_of, status_of
from stoker.operator.cluster.kube.kube_cluster import KubeCluster
from stoker.operator.cluster.kube.paths import collection, selector, single
from stoker.operator.cluster.kube.pod_addresses import PodAddresses, pod_url
from stoker.operator.domain.plan import Ref


def cause(**given: str) -> dict[str, Any]:
    return {"causes": [given]}


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (404, {"reason": "NotFound"}, interface.NotFound),
        (404, {"message": "404 page not found"}, interface.Unserved),
        (409, {"reason": "AlreadyExists"}, interface.AlreadyExists),
        (409, {"reason": "Conflict"}, interface.Conflict),
        (409, {"details": cause(reason="NamespaceTerminating")}, interface.NamespaceTerminating),
        (410, {"reason": "Expired"}, interface.Gone),
        (400, {"reason": "BadRequest"}, interface.Invalid),
        (422, {"details": cause(field="spec.replicas")}, interface.Invalid),
        (422, {"details": cause(field="metadata.uid")}, interface.Conflict),
        (401, {}, interface.Unauthorized),
        (403, {"reason": "Forbidden"}, interface.Forbidden),
        (403, {"details": cause(reason="NamespaceTerminating")}, interface.NamespaceTerminating),
        (429, {}, interface.TooManyRequests),
        (500, {"reason": "InternalError"}, interface.ServerError),
        (500, {"message": "failed to create typed patch object (n/x): .spec.y: field not declared"}, interface.Invalid),
        (504, {"reason": "Timeout"}, interface.ServerError),
        (415, {}, interface.ClusterError),
    ],
)
def test_each_answer_has_its_error(code: int, body: dict[str, Any], expected: type[Exception]) -> None:
    assert type(error_of(code, body, {}, "GET pods")) is expected


def test_the_message_is_the_servers_own() -> None:
    error = error_of(422, {"message": "spec.x: is wrong"}, {}, "POST /pods")
    assert str(error) == "POST /pods: spec.x: is wrong"


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "3"}, {}, 3.0),
        ({}, {"retryAfterSeconds": 7}, 7.0),
        ({}, {}, None),
        ({"Retry-After": "Sat"}, {}, None),
    ],
)
def test_how_long_to_wait_is_taken_from_header_or_details(
    headers: dict[str, str], details: dict[str, Any], seconds: float | None
) -> None:
    error = error_of(429, {"details": details}, headers, "GET pods")
    assert isinstance(error, interface.TooManyRequests)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize("text", ["<html>bad gateway</html>", "", "[1]", "3"])
def test_an_answer_that_is_no_status_is_its_own_message(text: str) -> None:
    assert status_of(text.encode()) == {"message": text}


def test_paths_of_core_named_and_cluster_wide_kinds() -> None:
    assert collection(KINDS["Pod"], None) == "/api/v1/pods"
    assert single(KINDS["Pod"], "a", "b") == "/api/v1/namespaces/a/pods/b"
    assert single(KINDS["EnginePool"], "a", "b", "scale") == (
        "/apis/stoker.dev/v1alpha1/namespaces/a/enginepools/b/scale"
    )
    assert single(KINDS["Node"], "", "n") == "/api/v1/nodes/n"
    assert collection(KINDS["Node"], "a") == "/api/v1/nodes"
    assert selector({"b": "2", "a": "1"}) == "a=1,b=2"


@pytest.mark.parametrize("name", [".", "..", "a/b", "a%2Fb"])
def test_what_is_read_as_another_path_is_no_name(name: str) -> None:
    for place in (("a", name), (name, "a")):
        with pytest.raises(interface.Invalid, match="may not be"):
            single(KINDS["Pod"], *place)


def pod(ip: str, ports: list[dict[str, Any]]) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": {"containers": [{"ports": ports}]}, "status": {"podIP": ip}}


def test_a_pod_is_reached_at_its_address_and_named_port() -> None:
    ports = [{"name": "rpc", "containerPort": 1}, {"name": "http", "containerPort": 8080}]
    assert pod_url(pod("10.0.0.1", ports)) == "http://10.0.0.1:8080"
    assert pod_url(pod("fd00::1", ports)) == "http://[fd00::1]:8080"
    assert pod_url(pod("10.0.0.1", [{"containerPort": 9}])) == "http://10.0.0.1:9"
    with pytest.raises(interface.PodUnreachable, match="no address"):
        pod_url(pod("", ports))
    with pytest.raises(interface.PodUnreachable, match="no port"):
        pod_url(pod("10.0.0.1", []))


def test_addresses_of_polled_pods_are_taken_from_what_a_watch_shows() -> None:
    ports = [{"name": "http", "containerPort": 8080}]

    def shown(uid: str, ip: str, **labels: str) -> dict[str, Any]:
        found = pod(ip, ports)
        return {**found, "metadata": {"name": uid, "uid": uid, "labels": labels}}

    book = PodAddresses(most=2)
    leader, role = {"stoker.dev/role": "trainer", "stoker.dev/node-rank": "0"}, "stoker.dev/role"
    book.note(shown("leader", "", **leader))
    assert book.get("leader") is None, "it has no address yet"
    for found in (
        shown("leader", "10.0.0.1", **leader),
        shown("second", "10.0.0.2", **{**leader, "stoker.dev/node-rank": "1"}),
        shown("foreign", "10.0.0.3"),
        shown("engine", "10.0.0.4", **{role: "engine"}),
    ):
        book.note(found)
    assert [book.get(uid) for uid in ("second", "foreign")] == [None, None], "they are never asked"
    assert book.get("engine") == "http://10.0.0.4:8080"
    assert book.get("leader") == "http://10.0.0.1:8080"
    book.note(shown("router", "10.0.0.5", **{role: "router"}))
    assert book.get("engine") is None, "only so many are kept, and the leader was used later"
    book.forget("leader")
    book.note(shown("leader", "10.0.0.6", **leader))
    assert book.get("leader") == "http://10.0.0.6:8080"


class Shown:
    """A connection whose watch and list show these events, and which counts what else is asked."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = events
        self.asked: list[str] = []

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        for event in self.events:
            yield event

    async def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        self.asked.append(f"{method} {path}")
        if path.endswith("/pods"):
            return {"items": [event["object"] for event in self.events], "metadata": {"resourceVersion": "1"}}
        raise interface.NotFound(path)


class Answers:
    async def poll(self, url: str, _uid: str) -> dict[str, Any]:
        return {"url": url}


def engine(uid: str, ip: str) -> dict[str, Any]:
    found = pod(ip, [{"name": "http", "containerPort": 8000}])
    metadata = {"name": uid, "namespace": "a", "uid": uid, "labels": {"stoker.dev/role": "engine"}}
    return {**found, "metadata": {**metadata, "resourceVersion": "1"}}


@pytest.mark.parametrize("listed", [True, False])
def test_a_pod_that_was_listed_or_watched_is_polled_without_being_read(listed: bool) -> None:
    pods = [{"type": "ADDED", "object": engine("e", "")}, {"type": "MODIFIED", "object": engine("e", "10.0.0.1")}]
    mark = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "9"}}}
    gone = {"type": "DELETED", "object": engine("gone", "10.0.0.2")}
    seen = {"type": "ADDED", "object": engine("gone", "10.0.0.2")}
    connection = Shown(*pods) if listed else Shown(mark, *pods, seen, gone, mark)
    cluster = KubeCluster(connection, Answers())  # type: ignore[arg-type]

    async def story() -> None:
        if listed:
            await cluster.list("Pod")
        else:
            assert len([event async for event in cluster.watch("Pod", "1")]) == 6
        before = len(connection.asked)
        assert await cluster.poll(Ref("Pod", "a", "e", "e")) == {"url": "http://10.0.0.1:8000"}
        assert len(connection.asked) == before
        with pytest.raises(interface.PodUnreachable, match="gone"):
            await cluster.poll(Ref("Pod", "a", "gone", "gone"))
        assert connection.asked[before:] == ["GET /api/v1/namespaces/a/pods/gone"]

    asyncio.run(story())
