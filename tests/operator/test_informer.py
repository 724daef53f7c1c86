"""An informer keeps the store equal to the cluster through dropped watches, 410s and lost events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import Gone, Keep, Listing, ServerError, WatchEvent
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.domain.plan import Object
from stoker.operator.loop.informer import MAX_SILENCE_S, Informer
from stoker.operator.loop.object_pruning import pruned
from stoker.operator.loop.store import Store
from testing.operator.cluster_contract import config_map, ref_of
from testing.operator.fakes import FakeClock, settle


class Watched:
    """ConfigMaps of an object store, with a watch that fails as `trouble` gives: an error, an end, or a silence."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.objects = ObjectStore(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: f"uid-{next(numbers)}")
        self.trouble: list[Exception | str] = []
        self.lists = 0
        self.watches = 0
        self._changed = asyncio.Event()
        self.objects.listeners.append(lambda _: self._changed.set())

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        self.lists += 1
        return Listing(tuple(self.objects.of_kind(kind, namespace)), str(self.objects.version))

    async def watch(
        self, kind: str, resource_version: str, *, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        self.watches += 1
        version = int(resource_version)
        while True:
            self._changed.clear()
            for record in self.objects.since(version):
                version = record.version
                yield WatchEvent(record.type, record.object)
            if self.trouble:
                what = self.trouble.pop(0)
                if isinstance(what, Exception):
                    raise what
                if what == "end":
                    return
                await asyncio.get_running_loop().create_future()  # silence for ever
            await self._changed.wait()

    def disturb(self, what: Exception | str) -> None:
        self.trouble.append(what)
        self._changed.set()


def started(cluster: Watched) -> tuple[Store, FakeClock, Informer, asyncio.Future[None]]:
    store, clock = Store(), FakeClock()
    informer = Informer(cluster, "ConfigMap", store, clock, lambda: 0.5)  # type: ignore[arg-type]
    return store, clock, informer, asyncio.ensure_future(informer.run())


async def stop(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def names(store: Store) -> list[str]:
    return [found["metadata"]["name"] for found in store.of_kind("ConfigMap")]


def test_it_lists_then_follows() -> None:
    async def story() -> None:
        cluster = Watched()
        cluster.objects.create(config_map("one"))
        store, _, informer, task = started(cluster)
        await settle()
        assert informer.synced.is_set()
        two = cluster.objects.create(config_map("two"))
        await settle()
        assert names(store) == ["one", "two"]
        cluster.objects.delete(ref_of(two))
        await settle()
        assert names(store) == ["one"]
        assert cluster.lists == 1
        await stop(task)

    asyncio.run(story())


def test_a_long_list_lets_others_have_their_turn() -> None:
    async def story() -> None:
        cluster = Watched()
        for number in range(320):
            cluster.objects.create(config_map(f"map-{number}"))
        store, _, informer, task = started(cluster)
        sizes = []
        while not informer.synced.is_set():
            await asyncio.sleep(0)
            sizes.append(len(names(store)))
        assert len(names(store)) == 320
        assert len(set(sizes)) >= 10
        await stop(task)

    asyncio.run(story())


def test_a_watch_that_ends_goes_on_without_a_list_and_without_a_rush() -> None:
    async def story() -> None:
        cluster = Watched()
        store, clock, informer, task = started(cluster)
        await clock.advance(60)
        cluster.disturb("end")
        await settle()
        assert (cluster.lists, cluster.watches, informer.silent_s()) == (1, 2, 0)
        cluster.disturb("end")
        await settle()
        assert cluster.watches == 2
        cluster.objects.create(config_map("one"))
        await clock.advance(0.5)
        assert names(store) == ["one"]
        assert (cluster.lists, cluster.watches) == (1, 3)
        await stop(task)

    asyncio.run(story())


def test_after_410_it_lists_again_and_finds_what_was_deleted_meanwhile() -> None:
    async def story() -> None:
        cluster = Watched()
        one = cluster.objects.create(config_map("one"))
        store, clock, _, task = started(cluster)
        await settle()
        cluster.disturb("silence")
        await settle()
        cluster.objects.delete(ref_of(one))  # no event is sent
        cluster.objects.create(config_map("two"))
        cluster.objects.forget_history()
        await settle()
        assert names(store) == ["one"]
        await clock.advance(MAX_SILENCE_S + 1)
        assert names(store) == ["two"]
        assert cluster.lists == 2
        await stop(task)

    asyncio.run(story())


def test_errors_are_waited_out_with_growing_delays() -> None:
    async def story() -> None:
        cluster = Watched()
        store, clock, _, task = started(cluster)
        await settle()
        failures: list[Exception | str] = [ServerError("no"), Gone("old"), ServerError("no")]
        cluster.trouble.extend(failures)
        cluster.objects.create(config_map("one"))
        await settle()
        await clock.advance(2)
        assert names(store) == ["one"]
        assert cluster.lists == 4
        await stop(task)

    asyncio.run(story())


def test_silence_is_measured_for_liveness() -> None:
    async def story() -> None:
        cluster = Watched()
        _, clock, informer, task = started(cluster)
        await settle()
        await clock.advance(10)
        assert informer.silent_s() == 10
        cluster.objects.create(config_map("one"))
        await settle()
        assert informer.silent_s() == 0
        await stop(task)

    asyncio.run(story())


def test_managed_fields_stay_outside() -> None:
    async def story() -> None:
        store, clock = Store(), FakeClock()
        body: Object = {**config_map("one")}
        body["metadata"] = {**body["metadata"], "uid": "u", "resourceVersion": "1", "managedFields": [{"manager": "x"}]}

        class Cluster:
            async def list(self, *_: Any, **__: Any) -> Listing:
                return Listing((body,), "1")

            async def watch(self, *_: Any, **__: Any) -> AsyncIterator[WatchEvent]:
                await asyncio.get_running_loop().create_future()
                yield WatchEvent("BOOKMARK", {})

        informer = Informer(Cluster(), "ConfigMap", store, clock, lambda: 0.5)  # type: ignore[arg-type]
        task = asyncio.ensure_future(informer.run())
        await settle()
        assert "managedFields" not in store.of_kind("ConfigMap")[0]["metadata"]
        await stop(task)

    asyncio.run(story())


TROUBLES = st.sampled_from(["end", "silence", "410", "500", "create", "delete", "change", "forget", "wait"])


@settings(max_examples=60, deadline=None)
@given(st.lists(TROUBLES, max_size=40))
def test_whatever_happens_the_store_ends_up_equal(troubles: list[str]) -> None:
    async def story() -> None:
        cluster = Watched()
        store, clock, _, task = started(cluster)
        await settle()
        for number, what in enumerate(troubles):
            known = cluster.objects.of_kind("ConfigMap")
            match what:
                case "create":
                    cluster.objects.create(config_map(f"map-{number}"))
                case "delete" if known:
                    cluster.objects.delete(ref_of(known[number % len(known)]))
                case "change" if known:
                    cluster.objects.patch(ref_of(known[number % len(known)]), {"data": {"n": str(number)}})
                case "410" | "500":
                    cluster.disturb(Gone("old") if what == "410" else ServerError("no"))
                case "forget":
                    cluster.objects.forget_history()
                case "wait":
                    await clock.advance(5)
                case "end" | "silence":
                    cluster.disturb(what)
            if number % 3 == 0:
                await settle(8)
        cluster.trouble.clear()
        await clock.advance(MAX_SILENCE_S * 2 + 60)
        assert store.of_kind("ConfigMap") == [pruned(found) for found in cluster.objects.of_kind("ConfigMap")]
        await stop(task)

    asyncio.run(story())
