"""The contract of every `Cluster`. A test module subclasses it with a factory, for LocalCluster and KubeCluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from stoker.operator.cluster.interface import AlreadyExists, Cluster, Conflict, Gone, Invalid, NotFound, WatchEvent
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.loop.store import version_of

NAMESPACE = "default"
WAIT_S = 60.0
Story = Callable[[Cluster], Awaitable[None]]


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}


def pool(name: str, replicas: int = 1) -> Object:
    """Return an EnginePool; a cluster with real admission gives its own through `ClusterContract.pool`."""
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "EnginePool",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"replicas": replicas, "revisions": []},
    }


def gated_pod(name: str) -> Object:
    """Return a pod that never starts."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "schedulingGates": [{"name": "stoker.dev/placement"}],
            "containers": [{"name": "main", "image": "none", "command": ["true"]}],
        },
    }


def ref_of(found: Object) -> Ref:
    metadata = found["metadata"]
    return Ref(found["kind"], metadata["namespace"], metadata["name"], metadata["uid"])


def owned(body: Object, owner: Object) -> Object:
    reference = {name: owner[name] for name in ("apiVersion", "kind")} | {
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [reference]}}


async def take(events: AsyncIterator[WatchEvent], count: int) -> list[tuple[str, str]]:
    """Return the next `count` changes as (type, name), without bookmarks."""
    found: list[tuple[str, str]] = []
    while len(found) < count:
        event = await asyncio.wait_for(anext(events), WAIT_S)
        if event.type != "BOOKMARK":
            found.append((event.type, event.object["metadata"]["name"]))
    return found


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await check():
            await asyncio.sleep(0.02)


class ClusterContract:
    """The tests of the contract.

    Subclass it as `Test...` with a fixture `connect`: an async context manager that yields an empty cluster.
    """

    pool = staticmethod(pool)
    collects_garbage = True
    """Dependents go with their owner; a control plane without controllers leaves them."""

    @pytest.fixture
    def connect(self) -> Callable[[], AbstractAsyncContextManager[Cluster]]:
        raise NotImplementedError

    @pytest.fixture
    def run(self, connect: Callable[[], AbstractAsyncContextManager[Cluster]]) -> Callable[[Story], None]:
        async def tell(story: Story) -> None:
            async with connect() as cluster:
                await story(cluster)

        return lambda story: asyncio.run(tell(story))

    def test_a_created_object_has_an_identity_and_can_be_read(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            created = await cluster.create(config_map("one", key="value"))
            assert created["metadata"]["uid"]
            assert int(created["metadata"]["resourceVersion"]) > 0
            assert created["metadata"]["creationTimestamp"]
            assert await cluster.get("ConfigMap", NAMESPACE, "one") == created

        run(story)

    def test_a_taken_name_is_refused(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            await cluster.create(config_map("one"))
            with pytest.raises(AlreadyExists):
                await cluster.create(config_map("one"))

        run(story)

    def test_what_is_not_there_is_not_found(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            ghost = Ref("ConfigMap", NAMESPACE, "ghost", "no-such-uid")
            for attempt in (
                cluster.get("ConfigMap", NAMESPACE, "ghost"),
                cluster.patch(ghost, {"data": {}}),
                cluster.delete(ghost),
                cluster.update_status(Ref("EnginePool", NAMESPACE, "ghost", "no-such-uid"), {}),
                cluster.scale(Ref("EnginePool", NAMESPACE, "ghost", "no-such-uid"), 1),
            ):
                with pytest.raises(NotFound):
                    await attempt

        run(story)

    def test_a_malformed_object_is_invalid(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            with pytest.raises(Invalid):
                await cluster.create(config_map("Not_A_Name"))

        run(story)

    def test_lists_select_by_label(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            for name, color in (("a", "red"), ("b", "blue"), ("c", "red")):
                body = config_map(name)
                await cluster.create({**body, "metadata": {**body["metadata"], "labels": {"color": color}}})
            listing = await cluster.list("ConfigMap", namespace=NAMESPACE, labels={"color": "red"})
            assert [item["metadata"]["name"] for item in listing.items] == ["a", "c"]
            assert all(item["kind"] == "ConfigMap" and item["apiVersion"] == "v1" for item in listing.items)

        run(story)

    def test_a_watch_tells_every_change_after_the_list(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            await cluster.create(config_map("before"))
            listing = await cluster.list("ConfigMap", namespace=NAMESPACE)
            events = cluster.watch("ConfigMap", listing.resource_version, namespace=NAMESPACE)
            one = await cluster.create(config_map("one"))
            await cluster.patch(ref_of(one), {"data": {"key": "value"}})
            await cluster.delete(ref_of(one))
            assert await take(events, 3) == [("ADDED", "one"), ("MODIFIED", "one"), ("DELETED", "one")]

        run(story)

    def test_a_merge_patch_replaces_adds_and_removes(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.create(config_map("one", a="1", b="2"))
            patched = await cluster.patch(ref_of(one), {"data": {"a": "9", "b": None, "c": "3"}})
            assert patched["data"] == {"a": "9", "c": "3"}
            assert version_of(patched) > version_of(one)

        run(story)

    def test_a_write_that_changes_nothing_makes_no_version(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.apply(config_map("one", a="1"), manager="us")
            assert version_of(await cluster.patch(ref_of(one), {"data": {"a": "1"}})) == version_of(one)
            again = await cluster.apply(config_map("one", a="1"), manager="us")
            assert version_of(again) == version_of(one)

        run(story)

    def test_the_same_name_with_another_uid_is_a_conflict(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.create(self.pool("one"))
            other = ref_of(one)._replace(uid="00000000-0000-0000-0000-000000000000")
            for attempt in (
                cluster.patch(other, {"metadata": {"labels": {"a": "b"}}}),
                cluster.update_status(other, {}),
                cluster.scale(other, 2),
                cluster.delete(other),
            ):
                with pytest.raises(Conflict):
                    await attempt

        run(story)

    def test_a_stale_version_is_a_conflict(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.create(self.pool("one"))
            old = one["metadata"]["resourceVersion"]
            await cluster.patch(ref_of(one), {"metadata": {"labels": {"a": "b"}}})
            with pytest.raises(Conflict):
                await cluster.patch(ref_of(one), {"metadata": {"resourceVersion": old, "labels": {"a": "c"}}})
            with pytest.raises(Conflict):
                await cluster.update_status(ref_of(one), {"replicas": 1}, resource_version=old)

        run(story)

    def test_apply_removes_what_it_leaves_out_and_keeps_what_others_wrote(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.apply(config_map("one", a="1", b="2"), manager="us")
            await cluster.patch(ref_of(one), {"data": {"theirs": "kept"}})
            applied = await cluster.apply(config_map("one", a="9"), manager="us")
            assert applied["data"] == {"a": "9", "theirs": "kept"}
            assert applied["metadata"]["uid"] == one["metadata"]["uid"]

        run(story)

    def test_status_is_apart_from_the_rest(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.create({**self.pool("one"), "status": {"replicas": 7}})
            assert not one.get("status")
            written = await cluster.update_status(ref_of(one), {"replicas": 1})
            assert written["status"] == {"replicas": 1}
            assert written["metadata"]["generation"] == one["metadata"]["generation"]
            patched = await cluster.patch(ref_of(one), {"status": {"replicas": 5}})
            assert patched["status"] == {"replicas": 1}

        run(story)

    def test_scale_changes_replicas_and_the_generation(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            one = await cluster.create(self.pool("one", 1))
            await cluster.scale(ref_of(one), 3)
            scaled = await cluster.get("EnginePool", NAMESPACE, "one")
            assert scaled["spec"]["replicas"] == 3
            assert scaled["metadata"]["generation"] == one["metadata"]["generation"] + 1

        run(story)

    def test_a_finalizer_holds_a_deleted_object(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            body = self.pool("one")
            one = await cluster.create({**body, "metadata": {**body["metadata"], "finalizers": ["stoker.dev/data"]}})
            left = await cluster.delete(ref_of(one))
            assert left is not None
            assert left["metadata"]["deletionTimestamp"]
            assert (await cluster.get("EnginePool", NAMESPACE, "one"))["metadata"]["deletionTimestamp"]
            await cluster.patch(ref_of(one), {"metadata": {"finalizers": []}})
            with pytest.raises(NotFound):
                await cluster.get("EnginePool", NAMESPACE, "one")

        run(story)

    def test_dependents_go_with_their_owner(self, run: Callable[[Story], None]) -> None:
        if not self.collects_garbage:
            pytest.skip("this cluster has no garbage collector")

        async def story(cluster: Cluster) -> None:
            owner = await cluster.create(config_map("owner"))
            await cluster.create(owned(config_map("child"), owner))
            await cluster.create(owned(gated_pod("pod"), owner))
            await cluster.delete(ref_of(owner))

            async def gone() -> bool:
                maps = await cluster.list("ConfigMap", namespace=NAMESPACE)
                pods = await cluster.list("Pod", namespace=NAMESPACE)
                return not [item for item in maps.items if item["metadata"]["name"] == "child"] and not pods.items

            await eventually(gone)

        run(story)

    def test_a_gated_pod_waits_and_its_gates_can_only_go(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            pod = await cluster.create(gated_pod("pod"))
            assert pod["status"]["phase"] == "Pending"
            gates = [*pod["spec"]["schedulingGates"], {"name": "stoker.dev/more"}]
            with pytest.raises(Invalid):
                await cluster.patch(ref_of(pod), {"spec": {"schedulingGates": gates}})
            with pytest.raises(Invalid):
                await cluster.patch(ref_of(pod), {"spec": {"restartPolicy": "Always"}})
            affinity: dict[str, Any] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["local"]}]}
                ]
            }}}  # fmt: skip
            patched = await cluster.patch(ref_of(pod), {"spec": {"affinity": affinity}})
            assert patched["spec"]["affinity"] == affinity

        run(story)

    def test_a_version_that_is_too_old_is_gone(self, run: Callable[[Story], None]) -> None:
        async def story(cluster: Cluster) -> None:
            await self.forget(cluster)
            with pytest.raises(Gone):
                await anext(cluster.watch("ConfigMap", "1", namespace=NAMESPACE))

        run(story)

    async def forget(self, cluster: Cluster) -> None:
        """Make the cluster drop its history."""
        raise NotImplementedError
