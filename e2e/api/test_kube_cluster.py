"""The contract of every cluster on a real API server, and its own features: pages, metadata-only views, refusals."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from e2e.api.plane import Plane
from stoker.operator.cluster.interface import Cluster, Invalid, NamespaceTerminating, NotFound, PodUnreachable
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.kube_cluster import KubeCluster, View
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Object, Ref
from stoker.pod.control_key import new_private_key
from testing.operator.cluster_contract import (
    NAMESPACE,
    ClusterContract,
    config_map,
    eventually,
    gated_pod,
    ref_of,
    take,
)

KEPT = {"kube-root-ca.crt"}
"""ConfigMaps that belong to the cluster."""


def pool(name: str, replicas: int = 1) -> Object:
    """Return an EnginePool that admission accepts."""
    template: Object = {"config": {}, "pod": {}}
    revision = {"name": "one", "share": 100, "template": template}
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "EnginePool",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"replicas": replicas, "revisions": [revision]},
    }


@asynccontextmanager
async def connected(plane: Plane, *, view: View | None = None, page_size: int = 250) -> AsyncIterator[KubeCluster]:
    clock = SystemClock()
    connection = ApiConnection(Access(str(plane.kubeconfig)), RateLimit(clock, per_second=500, burst=500))
    pods = PodHttp(new_private_key(), clock, lambda: secrets.token_hex(8))
    cluster = KubeCluster(connection, pods, view=view, page_size=page_size)
    try:
        yield cluster
    finally:
        await cluster.close()


async def empty(cluster: KubeCluster) -> None:
    """Remove what an earlier test left in the default namespace."""
    for kind in ("EnginePool", "Pod", "ConfigMap"):
        for found in (await cluster.list(kind, namespace=NAMESPACE)).items:
            if found["metadata"]["name"] in KEPT:
                continue
            if found["metadata"].get("finalizers"):
                await cluster.patch(ref_of(found), {"metadata": {"finalizers": []}})
            try:
                await cluster.delete(ref_of(found), grace_s=0)
            except NotFound:
                continue


class TestKubeCluster(ClusterContract):
    pool = staticmethod(pool)
    collects_garbage = False

    @pytest.fixture(autouse=True)
    def remember(self, plane: Plane) -> None:
        self.plane = plane

    @pytest.fixture
    def connect(self, plane: Plane) -> Callable[[], AbstractAsyncContextManager[Cluster]]:
        @asynccontextmanager
        async def connect() -> AsyncIterator[Cluster]:
            async with connected(plane) as cluster:
                await empty(cluster)
                yield cluster

        return connect

    async def forget(self, cluster: Cluster) -> None:
        """Restart the server, which then has no history."""
        self.plane.control_plane.restart_api_server()  # in this thread: its child ends with the thread that made it


def tell(plane: Plane, story: Callable[[KubeCluster], Any], **given: Any) -> None:
    async def run() -> None:
        async with connected(plane, **given) as cluster:
            await empty(cluster)
            await story(cluster)

    asyncio.run(run())


def test_a_list_in_pages_is_whole(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        for number in range(7):
            await cluster.create(config_map(f"page-{number}", key="x" * 10))
        seen: list[str] = []

        def keep(found: Object) -> Object:
            seen.append(found["metadata"]["name"])
            return {"metadata": {"name": found["metadata"]["name"]}}

        listing = await cluster.list("ConfigMap", namespace=NAMESPACE, keep=keep)
        names = [item["metadata"]["name"] for item in listing.items if item["metadata"]["name"] not in KEPT]
        assert names == [f"page-{number}" for number in range(7)]
        assert len(seen) == len(listing.items)
        assert all(set(item) == {"metadata"} for item in listing.items)

    tell(plane, story, page_size=2)


def test_a_metadata_only_view_never_sees_content(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        await cluster.create(config_map("secretive", key="value"))
        listing = await cluster.list("ConfigMap", namespace=NAMESPACE)
        found = next(item for item in listing.items if item["metadata"]["name"] == "secretive")
        assert found["kind"] == "ConfigMap"
        assert found["apiVersion"] == "v1"
        assert "data" not in found
        events = cluster.watch("ConfigMap", listing.resource_version, namespace=NAMESPACE)
        await cluster.create(config_map("later", key="value"))
        event = await asyncio.wait_for(anext(events), 120)
        assert event.object["kind"] == "ConfigMap"
        assert "data" not in event.object
        assert (await cluster.get("ConfigMap", NAMESPACE, "later"))["data"] == {"key": "value"}

    tell(plane, story, view=View(metadata_only=frozenset({"ConfigMap"})))


def test_a_view_by_label_shows_objects_come_and_go(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        listing = await cluster.list("ConfigMap", namespace=NAMESPACE)
        assert listing.items == ()
        events = cluster.watch("ConfigMap", listing.resource_version, namespace=NAMESPACE)
        await cluster.create(config_map("foreign"))
        body = config_map("ours")
        ours = await cluster.create({**body, "metadata": {**body["metadata"], "labels": {"mine": "yes"}}})
        await cluster.patch(ref_of(ours), {"metadata": {"labels": {"mine": None}}})
        assert await take(events, 2) == [("ADDED", "ours"), ("DELETED", "ours")]

    tell(plane, story, view=View(labels={"ConfigMap": {"mine": "yes"}}))


def test_an_unknown_field_is_named(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        pod = gated_pod("typo")
        pod["spec"]["containers"][0]["imagePullPolice"] = "Never"
        with pytest.raises(Invalid, match="imagePullPolice"):
            await cluster.create(pod)

    tell(plane, story)


def test_a_terminating_namespace_takes_nothing_new(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        plane.kubectl("create", "namespace", "ending")
        plane.kubectl("delete", "namespace", "ending", "--wait=false")
        body = config_map("late")
        with pytest.raises(NamespaceTerminating):
            await cluster.create({**body, "metadata": {"name": "late", "namespace": "ending"}})
        with pytest.raises(NamespaceTerminating):
            await cluster.apply({**body, "metadata": {"name": "late", "namespace": "ending"}}, manager="us")

    tell(plane, story)


def test_a_status_is_replaced_as_a_whole(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        one = await cluster.create(pool("one"))
        await cluster.update_status(ref_of(one), {"replicas": 1, "message": "waits"})
        written = await cluster.update_status(ref_of(one), {"replicas": 2})
        assert written["status"] == {"replicas": 2}
        with pytest.raises(Invalid, match=r"status\.replicas"):
            await cluster.update_status(ref_of(one), {"replicas": "many"})

    tell(plane, story)


def test_a_revision_that_leaves_the_applied_list_goes_whole(plane: Plane) -> None:
    """The pool is made by POST, which owns what an apply does not change."""

    async def story(cluster: KubeCluster) -> None:
        made = pool("rolled", replicas=3)
        await cluster.create(made)
        one, two = made["spec"]["revisions"][0], {"name": "two", "share": 100, "template": {"config": {}, "pod": {}}}
        spec: Object = {"maxSurge": 1}
        for revisions in ([two, {**one, "share": 0}], [two]):
            await cluster.apply({**made, "spec": {**spec, "revisions": revisions}}, manager="stoker-operator")
        found = await cluster.get("EnginePool", NAMESPACE, "rolled")
        assert [(item["name"], item["share"]) for item in found["spec"]["revisions"]] == [("two", 100)]
        assert found["spec"]["replicas"] == 3

    tell(plane, story)


def test_a_deleted_gated_pod_is_gone_at_once(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        pod = await cluster.create(gated_pod("brief"))
        assert await cluster.delete(ref_of(pod)) is None
        with pytest.raises(NotFound):
            await cluster.get("Pod", NAMESPACE, "brief")

    tell(plane, story)


def test_a_pod_without_an_address_cannot_be_asked(plane: Plane) -> None:
    async def story(cluster: KubeCluster) -> None:
        pod = await cluster.create(gated_pod("silent"))
        with pytest.raises(PodUnreachable, match="no address"):
            await cluster.poll(ref_of(pod))
        with pytest.raises(PodUnreachable, match="gone"):
            await cluster.poll(Ref("Pod", NAMESPACE, "never", "no-such-uid"))

    tell(plane, story)


def test_no_call_waits_for_a_server_that_starts_again(plane: Plane) -> None:
    """While the server is away, calls fail as transport errors; afterwards they work on the same client."""

    async def story(cluster: KubeCluster) -> None:
        await cluster.create(config_map("before"))
        plane.control_plane.restart_api_server()

        async def back() -> bool:
            return bool((await cluster.get("ConfigMap", NAMESPACE, "before"))["metadata"]["uid"])

        await eventually(back)

    tell(plane, story)


def test_an_opaque_template_is_fixed_to_its_last_leaf(plane: Plane) -> None:
    """`self == oldSelf` holds for objects whose fields are in no schema."""

    def with_config(**config: Any) -> Object:
        body = pool("fixed")
        body["spec"]["revisions"][0]["template"]["config"] = {
            "scheduler": {"maxTokens": 1, "list": [1, {"a": 2.5}]},
            **config,
        }
        return body

    async def story(cluster: KubeCluster) -> None:
        first = await cluster.apply(with_config(), manager="us")
        again = await cluster.apply(with_config(), manager="us")
        assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        labelled = with_config()
        labelled["metadata"]["labels"] = {"a": "b"}
        await cluster.apply(labelled, manager="us")
        with pytest.raises(Invalid, match="a revision's template cannot be changed"):
            await cluster.apply(with_config(scheduler={"maxTokens": 1, "list": [1, {"a": 3.5}]}), manager="us")

    tell(plane, story)
