"""The embedded cluster passes the contract, in memory and with its objects in files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Cluster
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.object_files import ObjectFiles
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.pod.control_key import new_private_key
from testing.operator.cluster_contract import ClusterContract, config_map, ref_of
from testing.operator.fakes import FakeClock


def new_store(folder: Path | None = None) -> ObjectStore:
    numbers = itertools.count(1)
    keeper = ObjectFiles(folder) if folder is not None else None
    return ObjectStore(
        now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: f"uid-{next(numbers)}", storage=keeper
    )


class TestLocalCluster(ClusterContract):
    @pytest.fixture(params=["memory", "files"])
    def connect(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Callable[[], AbstractAsyncContextManager[Cluster]]:
        @asynccontextmanager
        async def connect() -> AsyncIterator[Cluster]:
            objects = new_store(tmp_path if request.param == "files" else None)
            clock = SystemClock()
            pods = PodHttp(new_private_key(), clock, lambda: "token")
            yield LocalCluster(objects, Addresses("loopback", lambda _: True), pods, clock)
            await pods.close()
            if request.param == "files":
                again = new_store(tmp_path)
                for kind in ("ConfigMap", "EnginePool", "Pod"):
                    assert again.of_kind(kind) == objects.of_kind(kind)

        return connect

    async def forget(self, cluster: Cluster) -> None:
        assert isinstance(cluster, LocalCluster)
        cluster.objects.create(config_map("any"))
        cluster.objects.forget_history()


def test_an_applied_intent_survives_a_restart(tmp_path: Path) -> None:
    new_store(tmp_path).apply(config_map("one", a="1", b="2"), "us")
    applied = new_store(tmp_path).apply(config_map("one", a="1"), "us")
    assert applied["data"] == {"a": "1"}


def test_versions_go_on_after_a_restart(tmp_path: Path) -> None:
    first = new_store(tmp_path)
    one = first.create(config_map("one"))
    first.delete(ref_of(first.create(config_map("two"))))
    assert new_store(tmp_path).version > first.version > int(one["metadata"]["resourceVersion"])


def test_a_half_written_file_is_dropped(tmp_path: Path) -> None:
    new_store(tmp_path).create(config_map("one"))
    leftover = tmp_path / "ConfigMap" / "default" / "two.new"
    leftover.write_text('{"object": {')
    assert [item["metadata"]["name"] for item in new_store(tmp_path).of_kind("ConfigMap")] == ["one"]
    assert not leftover.exists()


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    new_store(tmp_path).create(config_map("one"))
    (tmp_path / "ConfigMap" / "default" / "bad.json").write_text("[]")
    store = new_store(tmp_path)
    assert [item["metadata"]["name"] for item in store.of_kind("ConfigMap")] == ["one"]
    (problem,) = store.problems()
    assert f"ConfigMap default/bad is lost: {tmp_path}/ConfigMap/default/bad.json.damaged: not an object" in problem


def test_files_belong_to_their_user_alone(tmp_path: Path) -> None:
    new_store(tmp_path / "objects").create(config_map("one"))
    file = tmp_path / "objects" / "ConfigMap" / "default" / "one.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o077 == 0


def test_an_object_whose_owner_is_gone_does_not_stay() -> None:
    store = new_store()
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "ghost", "uid": "no-such-uid"}
    body = config_map("child")
    store.create({**body, "metadata": {**body["metadata"], "ownerReferences": [reference]}})
    assert store.of_kind("ConfigMap") == []


def test_an_apply_drops_its_own_finalizers_and_owners_and_no_others() -> None:
    store = new_store()
    owners = [store.create(config_map(name)) for name in ("a", "b")]
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": one["metadata"]["name"], "uid": one["metadata"]["uid"]}
        for one in owners
    ]

    def applied(finalizers: list[str] | None, owners: list[dict[str, str]] | None) -> tuple[Any, Any]:
        given = {"finalizers": finalizers, "ownerReferences": owners}
        body = config_map("one")
        body["metadata"] |= {name: value for name, value in given.items() if value is not None}
        metadata = store.apply(body, "us")["metadata"]
        return metadata.get("finalizers"), metadata.get("ownerReferences")

    assert applied(["us.dev/a", "us.dev/b"], references) == (["us.dev/a", "us.dev/b"], references)
    ref = ref_of(store.of_kind("ConfigMap")[-1])
    store.patch(ref, {"metadata": {"finalizers": ["us.dev/a", "us.dev/b", "them.dev/c"]}})
    assert applied(["us.dev/b"], references[1:]) == (["us.dev/b", "them.dev/c"], references[1:])
    assert applied(None, None) == (["them.dev/c"], None)


def test_only_the_newest_events_are_kept() -> None:
    store = new_store()
    for number in range(1010):
        store.create(
            {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"event-{number}", "namespace": "default"}}
        )
    names = [event["metadata"]["name"] for event in store.of_kind("Event")]
    assert len(names) == 1000
    assert "event-9" not in names
    assert "event-1009" in names


def test_a_quiet_kind_gets_bookmarks_however_busy_the_others_are() -> None:
    async def story() -> None:
        clock, store, heard = FakeClock(), new_store(), []
        pods = PodHttp(new_private_key(), clock, lambda: "token")
        cluster = LocalCluster(store, Addresses("loopback", lambda _: True), pods, clock)

        async def listen() -> None:
            version = (await cluster.list("Secret")).resource_version
            async for event in cluster.watch("Secret", version):
                heard.append((event.type, clock.passed_s))

        listening = asyncio.create_task(listen())
        for number in range(20):
            await clock.advance(2)
            store.create(config_map(f"busy-{number}"))
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await pods.close()
        assert heard == [("BOOKMARK", 15), ("BOOKMARK", 30)]

    asyncio.run(story())
