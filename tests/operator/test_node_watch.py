"""The node watch: from nodes and pods in the store to the view of a pass, and to the resources to be reconciled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from stoker.operator.cluster.interface import ServerError, WatchEvent
from stoker.operator.domain.lost_nodes import NodeLimits, NodeLoss, Outage
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.node_watch import LOOK_S, NodeCounts, NodeWatch
from stoker.operator.loop.operator import Operator
from stoker.operator.loop.store import Store
from testing.operator.cluster_contract import owned, pool, ref_of
from testing.operator.fakes import Embedded, FakeClock, FakePods, embedded, reconcile_nothing, settle


class World:
    """A watch over a store that a test fills."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = Store()
        self.watched = True
        self.woken: list[str] = []
        limits = NodeLimits(lost_s=10, outage_share=0.5, outage_nodes=3)
        self.watch = NodeWatch(self.store, self.clock, limits, lambda: self.watched, self._wake)
        self.version = 0

    def node(self, name: str, ready: str = "True", zone: str = "") -> None:
        labels = {"topology.kubernetes.io/zone": zone} if zone else {}
        conditions = [{"type": "Ready", "status": ready}]
        self.put("Node", name, {"labels": labels}, status={"conditions": conditions})

    def pod(self, node: str, phase: str = "Running") -> None:
        self.put("Pod", f"on-{node}", {"namespace": "a"}, spec={"nodeName": node}, status={"phase": phase})

    def nodes(self, **ready: str) -> None:
        for name, status in ready.items():
            self.node(name, status)
            self.pod(name)

    def put(self, kind: str, name: str, metadata: dict[str, Any], **parts: Any) -> None:
        self.version += 1
        metadata |= {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.store.put({"apiVersion": "v1", "kind": kind, "metadata": metadata, **parts})

    def _wake(self, node: Object) -> None:
        self.woken.append(node["metadata"]["name"])


def test_a_silent_node_with_pods_has_its_time_from_when_it_was_seen() -> None:
    world = World()
    world.nodes(a="Unknown", b="True", c="True")
    assert world.watch.losses() == NodeLoss(left_s={"a": 10})
    world.clock.passed_s = 10
    assert world.watch.losses() == NodeLoss(lost=frozenset("a"))


def test_a_node_that_answers_badly_is_not_silent() -> None:
    world = World()
    world.nodes(a="False")
    world.clock.passed_s = 100
    assert world.watch.losses() == NodeLoss()


def test_a_node_that_speaks_is_not_lost_a_moment_later() -> None:
    world = World()
    world.nodes(a="Unknown", b="True", c="True")
    world.watch.look()
    world.clock.passed_s = 20
    assert world.watch.losses().lost == {"a"}
    world.node("a", "True")
    assert world.watch.losses() == NodeLoss()


def test_only_nodes_with_pods_that_have_not_ended_count() -> None:
    world = World()
    world.nodes(a="Unknown", b="Unknown", c="Unknown", d="True", e="True", f="True", g="True")
    assert world.watch.losses().outages == {}
    for name in ("e", "f", "g"):
        world.pod(name, "Succeeded")
    world.clock.passed_s = LOOK_S
    assert world.watch.losses().outages["a"] == Outage(silent=3, nodes=4)


def test_whom_an_outage_concerns_looks_again_when_it_begins_and_when_it_ends() -> None:
    world = World()
    world.nodes(a="Unknown", b="Unknown", c="True", d="True")
    world.watch.look()
    assert world.woken == []
    world.node("c", "Unknown")
    world.watch.look()
    world.watch.look()
    assert world.woken == ["a", "b", "c"]
    assert world.watch.counts == NodeCounts(silent=3, in_outage=3, outages=1)
    world.woken.clear()
    world.node("c", "True")
    world.watch.look()
    assert world.woken == ["a", "b", "c"]
    assert world.watch.counts == NodeCounts(silent=2, in_outage=0, outages=1)


def test_an_outage_of_a_zone_is_counted_once_and_named() -> None:
    world = World()
    for name in ("a", "b", "c", "d", "e", "f"):
        world.node(name, "Unknown" if name < "d" else "True", "x" if name < "d" else "y")
        world.pod(name)
    assert world.watch.losses().outages["b"] == Outage(silent=3, nodes=3, zone="x")
    assert world.watch.counts.outages == 1


def test_a_node_that_is_gone_is_not_silent_any_more() -> None:
    world = World()
    world.nodes(a="Unknown")
    world.watch.look()
    world.store.remove(Key("Node", "", "a"), "uid-a", 100)
    assert world.watch.losses() == NodeLoss()
    assert world.watch.counts.silent == 0


def test_silence_counts_from_when_news_can_arrive_again() -> None:
    world = World()
    world.nodes(a="Unknown", b="True")
    world.watch.look()
    world.watched = False
    world.clock.passed_s = 60
    assert world.watch.losses().lost == frozenset()
    world.watched = True
    world.clock.passed_s = 120
    assert world.watch.losses() == NodeLoss(left_s={"a": 10})


def test_the_operator_keeps_the_pods_of_an_outage_says_so_and_ends_it(tmp_path: Path) -> None:
    """Four nodes with one pod each; three fall silent at once, for an hour; then two of them are back."""
    asyncio.run(_an_outage(tmp_path))


@asynccontextmanager
async def at_work(world: Embedded, cluster: Any, settings: Settings, nodes: str) -> AsyncIterator[Operator]:
    """Run an operator for a second on nodes with one pod each; `cluster` is its view of the world's cluster."""
    await world.kubelet.stop(0)
    owner = world.objects.create(pool("pool"))
    for name in nodes:
        world.objects.create(node(name))
        world.objects.create(pod_on(name, owner))
    operator = Operator(cluster, settings, {"EnginePool": reconcile_nothing}, clock=world.clock, jitter=lambda: 0.5)
    work = asyncio.ensure_future(operator.run())
    try:
        await world.clock.advance(1)
        yield operator
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await settle()


async def _an_outage(folder: Path) -> None:
    world = embedded(folder, pods=FakePods())
    async with at_work(world, world.cluster, Settings(), "abcd") as operator:
        operator.metrics.watch(operator.state)
        for name in "abc":
            silence(world.objects, name, "Unknown")
        await world.clock.advance(3600)
        text = "no pod counts as lost: 3 of 4 nodes with pods are silent at once"
        assert [found["message"] for found in conditions(world.objects)] == [text]
        assert [found["message"] for found in world.objects.of_kind("Event")] == [text]
        assert not any(found["metadata"].get("deletionTimestamp") for found in world.objects.of_kind("Pod"))
        told = generate_latest(operator.metrics.registry).decode()
        assert "stoker_operator_nodes_in_outage 3.0" in told
        assert "stoker_operator_node_outages_total 1.0" in told

        for name in "ab":
            silence(world.objects, name, "True")
        await world.clock.advance(9)
        assert conditions(world.objects) == []
        assert operator.nodes.losses().lost == frozenset()
        await world.clock.advance(2)
        assert operator.nodes.losses().lost == {"c"}


class Unreachable:
    """A cluster whose nodes cannot be watched while `away`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def list(self, kind: str, **given: Any) -> Any:
        self._check(kind)
        return await self.inner.list(kind, **given)

    async def watch(self, kind: str, resource_version: str, **given: Any) -> AsyncIterator[WatchEvent]:
        async for event in self.inner.watch(kind, resource_version, **given):
            self._check(kind)
            yield event

    def _check(self, kind: str) -> None:
        if self.away and kind == "Node":
            raise ServerError("away")


def test_while_the_api_server_is_away_no_silence_counts(tmp_path: Path) -> None:
    asyncio.run(_an_api_server_that_is_away(tmp_path))


async def _an_api_server_that_is_away(folder: Path) -> None:
    world = embedded(folder, pods=FakePods())
    cluster = Unreachable(world.cluster)
    async with at_work(world, cluster, Settings(node_lost_s=100), "ab") as operator:
        silence(world.objects, "a", "Unknown")
        await world.clock.advance(50)
        assert 40 < operator.nodes.losses().left_s["a"] <= 51
        cluster.away = True
        await world.clock.advance(200)
        assert operator.nodes.losses().lost == frozenset()
        cluster.away = False
        await world.clock.advance(60)
        assert operator.nodes.losses().lost == frozenset()
        await world.clock.advance(100)
        assert operator.nodes.losses().lost == {"a"}


def node(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod_on(name: str, owner: Object) -> Object:
    body: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"on-{name}", "namespace": "default", "labels": {"stoker.dev/role": "engine"}},
        "spec": {"nodeName": name, "restartPolicy": "Never", "containers": [{"name": "main", "command": ["true"]}]},
    }
    return owned(body, owner)


def silence(objects: Any, name: str, ready: str) -> None:
    found = next(item for item in objects.of_kind("Node") if item["metadata"]["name"] == name)
    objects.update_status(ref_of(found), {"conditions": [{"type": "Ready", "status": ready}]})


def conditions(objects: Any) -> list[dict[str, Any]]:
    return list((objects.get(Key("EnginePool", "default", "pool")).get("status") or {}).get("conditions") or ())
