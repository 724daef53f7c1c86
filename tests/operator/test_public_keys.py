"""The public keys leave a namespace with its last resource, and no other object leaves with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Forbidden
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.execute import PlanExecutor
from stoker.operator.loop.public_keys import PublicKeys
from stoker.operator.loop.store import Store
from stoker.operator.render.keys import keys_object
from testing.operator.cluster_contract import pool
from testing.operator.fakes import Embedded, FakePods, embedded

SETTINGS = Settings()
NAME = SETTINGS.control_keys_config_map


class World:
    """Namespaces a and b with keys that the operator applied; `refused` namespaces refuse every deletion."""

    def __init__(self, inner: Embedded) -> None:
        self.inner = inner
        self.refused: set[str] = set()
        self.store = Store()
        self.executor = PlanExecutor(self, self.store, inner.clock)
        self.settings = SETTINGS
        self.keys = PublicKeys(self.store, self.executor, lambda namespace: keys_object(namespace, self.settings))
        self.meanwhile: Callable[[], None] = lambda: None
        """The event while a deletion is on its way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner.cluster, name)

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        if ref.namespace in self.refused:
            raise Forbidden("no")
        self.meanwhile()
        return await self.inner.cluster.delete(ref, grace_s=grace_s)

    def left(self) -> list[str]:
        found = [item["metadata"] for item in self.inner.objects.of_kind("ConfigMap")]
        return sorted(metadata["namespace"] for metadata in found if metadata["name"] == NAME)


def run(folder: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        inner = embedded(folder, pods=FakePods())
        world = World(inner)
        for namespace in ("a", "b"):
            await world.executor.apply(keys_object(namespace, SETTINGS))
        try:
            await story(world)
        finally:
            await inner.kubelet.stop(0)

    asyncio.run(whole())


def put(world: World, body: Object) -> None:
    world.store.put(world.inner.objects.create(body))


def in_namespace(body: Object, namespace: str) -> Object:
    return {**body, "metadata": {**body["metadata"], "namespace": namespace}}


def test_they_leave_a_namespace_without_resources_and_no_other(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        put(world, in_namespace(pool("serves"), "b"))
        await world.keys.remove_if_unused("a")
        await world.keys.remove_if_unused("b")
        assert world.left() == ["b"]
        assert world.store.get(Key("ConfigMap", "a", NAME)) is None

    run(tmp_path, story)


def test_a_namespace_that_refuses_keeps_its_own_and_hinders_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        world.refused = {"a"}
        await world.keys.remove_unused()
        assert world.left() == ["a"]
        assert "the public keys stay in namespace a: no" in caplog.text

    run(tmp_path, story)


def test_a_foreign_object_of_the_same_name_stays(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        metadata = {"name": NAME, "namespace": "c"}
        theirs: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}
        put(world, theirs)
        await world.keys.remove_unused()
        assert world.left() == ["c"]

    run(tmp_path, story)


def test_a_resource_that_comes_while_they_leave_gets_them_back(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.meanwhile = lambda: put(world, in_namespace(pool("serves"), "a"))
        await world.keys.remove_if_unused("a")
        assert world.left() == ["a", "b"]
        assert world.store.get(Key("ConfigMap", "a", NAME)) is not None

    run(tmp_path, story)


def test_new_keys_go_to_every_namespace_that_has_old_ones(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.settings = replace(SETTINGS, control_public_keys={"current.pem": "new"})
        await world.keys.renew()
        data = [world.inner.objects.get(Key("ConfigMap", namespace, NAME))["data"] for namespace in ("a", "b")]
        assert data == [{"current.pem": "new"}, {"current.pem": "new"}]

    run(tmp_path, story)


def test_it_takes_no_request_where_there_are_none(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        before = world.inner.objects.version
        await world.keys.remove_if_unused("nowhere")
        assert world.inner.objects.version == before

    run(tmp_path, story)
